"""Muon: matrices move by their orthogonalised momentum (Newton-Schulz), all other parameters by AdamW.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), as torch.optim.Muon has it, but that the iteration is
in the state's dtype. torch casts to bfloat16 there, whose rounding has no derivative: its runs agree with these to bfloat16 only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from magic_pipeline.metagradient.optimizers import AdamW
from magic_pipeline.metagradient.state import Slots, Tensors

_BUFFER = "momentum_buffer"


@dataclass(frozen=True)
class Muon:
    """Muon for the parameters named in `matrices`, AdamW at `adamw_lr_factor` times the learning rate for the others.

        m' = momentum m + (1 - momentum) g;   u = (1 - momentum) g + momentum m'  if nesterov else m'
        p' = (1 - lr * weight_decay) p - lr * adjusted * NewtonSchulz(u)

    `adjusted` is sqrt(max(1, rows / columns)) by "original" (None), 0.2 * sqrt(max(rows, columns)) by "match_rms_adamw".

    Whole matrices are needed: with more than one logical rank, which hold pieces of them, there is no such update.
    """

    matrices: frozenset[str]
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    adjust_lr_fn: str | None = None
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    eps: float = 1e-7
    adamw: AdamW = field(default_factory=AdamW)
    adamw_lr_factor: float = 1.0

    @property
    def eps_root(self) -> float:
        """The AdamW part's; Newton-Schulz has no square root but the norm's."""
        return self.adamw.eps_root

    def init(self, params: Tensors) -> Slots:
        mine, others = self._split(params)
        momentum = {_BUFFER: {name: torch.zeros_like(p) for name, p in mine.items()}} if mine else {}
        return {**momentum, **(self.adamw.init(others) if others else {})}

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        mine, others = self._split(params)
        new_params, new_slots = dict[str, Tensor](), dict[str, Tensors]()
        if others:
            rate = lr * self.adamw_lr_factor
            moved, slots_after = self.adamw.update(others, slots, grads, rate, step)
            new_slots |= slots_after
            new_params |= moved
        if mine:
            buffers = dict[str, Tensor]()
            for name, p in mine.items():
                buffers[name], u = self._directions(slots[_BUFFER][name], grads[name])
                move, _ = newton_schulz(u, self.ns_coefficients, self.ns_steps, self.eps)
                new_params[name] = p.mul(1 - lr * self.weight_decay).add(move, alpha=-lr * self._adjusted(p))
            new_slots[_BUFFER] = buffers
        return {name: new_params[name] for name in params}, {slot: new_slots[slot] for slot in slots}

    def pull_back(
        self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int, cot_params: Tensors, cot_slots: Slots
    ) -> tuple[Tensors, Slots, Tensors]:
        mine, others = self._split(params)
        to_params, to_slots, to_grads = dict[str, Tensor](), dict[str, Tensors](), dict[str, Tensor]()
        if others:
            rate = lr * self.adamw_lr_factor
            cots = {name: cot_params[name] for name in others}
            pulled = self.adamw.pull_back(others, slots, grads, rate, step, cots, cot_slots)
            to_params |= pulled[0]
            to_slots |= pulled[1]
            to_grads |= pulled[2]
        if mine:
            to_buffers = dict[str, Tensor]()
            for name, p in mine.items():
                cot = cot_params[name]
                _, u = self._directions(slots[_BUFFER][name], grads[name])
                _, iterates = newton_schulz(u, self.ns_coefficients, self.ns_steps, self.eps)
                cot_u = torch.stack(
                    [
                        newton_schulz_pull_back(u, iterates, self.ns_coefficients, self.eps, one)
                        for one in cot.mul(-lr * self._adjusted(p))
                    ]
                )
                cot_m = cot_slots[_BUFFER][name].add(cot_u, alpha=self.momentum if self.nesterov else 1.0)
                to_buffers[name] = cot_m.mul(self.momentum)
                to_grads[name] = (cot_m + cot_u if self.nesterov else cot_m).mul_(1 - self.momentum)
                to_params[name] = cot.mul(1 - lr * self.weight_decay)
            to_slots[_BUFFER] = to_buffers
        ordered = ({name: tensors[name] for name in params} for tensors in (to_params, to_grads))
        return next(ordered), {slot: to_slots[slot] for slot in slots}, next(ordered)

    def _split(self, params: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Muon's parameters and AdamW's."""
        return (
            {name: p for name, p in params.items() if name in self.matrices},
            {name: p for name, p in params.items() if name not in self.matrices},
        )

    def _directions(self, momentum: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The next momentum, and what is orthogonalised."""
        m = momentum.lerp(grad, 1 - self.momentum)
        return m, grad.lerp(m, self.momentum) if self.nesterov else m

    def _adjusted(self, parameter: Tensor) -> float:
        rows, columns = parameter.shape[-2:]
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


def newton_schulz(
    u: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> tuple[Tensor, list[Tensor]]:
    """The singular values of `u` `[..., rows, columns]` driven towards 1, in its dtype; and what each iteration began with.

    X = u / max(|u|, eps);   X <- a X + (b A + c A^2) X   with A = X X^T, on the side that makes A small.
    """
    a, b, c = coefficients
    x = _wide(u) / torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True).clamp(min=eps)
    iterates = list[Tensor]()
    for _ in range(steps):
        iterates.append(x)
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return _narrow(x, u), iterates


def newton_schulz_pull_back(
    u: Tensor, iterates: list[Tensor], coefficients: tuple[float, float, float], eps: float, cot: Tensor
) -> Tensor:
    """The cotangent `[rows, columns]` of Newton-Schulz's result to that of `u`, of one lane.

    One lane at a time: a matrix product over lanes would let a lane's position change its last bits.
    """
    a, b, c = coefficients
    cot = _wide(cot)
    for x in reversed(iterates):
        gram = x @ x.mT
        outer = cot @ x.mT
        cot_gram = b * outer + c * (outer @ gram + gram @ outer)
        cot = a * cot + (b * gram + c * (gram @ gram)) @ cot + (cot_gram + cot_gram.mT) @ x
    norm = torch.linalg.vector_norm(u)
    if float(norm) <= eps:
        return _narrow(cot / eps, u)
    unit = _wide(u) / norm
    return _narrow((cot - (unit * cot).sum() * unit) / norm, u)


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix


def _narrow(wide: Tensor, like: Tensor) -> Tensor:
    return wide.mT if like.shape[-2] > like.shape[-1] else wide
