"""Optimizers as pure functions, each with its pullback in closed form.

With `eps_root = 0` an update equals torch.optim's to rounding. The pullbacks are the transposed Jacobians of the update, written out
so that a lane costs a few passes over the parameters; tests compare them with autograd of the update.

Clipping is torch's rule `g * min(1, max_norm / (norm + 1e-6))`, differentiated through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magic_pipeline.errors import NonFiniteError
from magic_pipeline.metagradient.ranks import Ranks
from magic_pipeline.metagradient.state import Slots, Tensors

ALL = Ranks()  # one rank, which owns everything


class Optimizer(Protocol):
    """One optimizer: `update` maps (params, slots, grads) to (params, slots); `pull_back` is its transpose."""

    def init(self, params: Tensors) -> Slots:
        """The slots before the first step."""
        ...

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        """The update of step number `step`, counted from 0."""
        ...

    def pull_back(
        self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int, cot_params: Tensors, cot_slots: Slots
    ) -> tuple[Tensors, Slots, Tensors]:
        """Cotangents `[lanes, *shape]` of the update's results to those of (params, slots, grads), in fresh tensors."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum and coupled weight decay, as torch.optim.SGD (dampening 0).

    d = g + weight_decay * p;   m' = momentum * m + d;   p' = p - lr * (d + momentum * m'  if nesterov else m')
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def init(self, params: Tensors) -> Slots:
        if self.momentum == 0:
            return {}
        return {"momentum_buffer": {name: torch.zeros_like(p) for name, p in params.items()}}

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        new_params, new_momentum = {}, {}
        for name, p in params.items():
            d = grads[name] if self.weight_decay == 0 else grads[name].add(p, alpha=self.weight_decay)
            if self.momentum != 0:
                m = slots["momentum_buffer"][name].mul(self.momentum).add(d)
                new_momentum[name] = m
                d = d.add(m, alpha=self.momentum) if self.nesterov else m
            new_params[name] = p.add(d, alpha=-lr)
        return new_params, ({"momentum_buffer": new_momentum} if self.momentum != 0 else {})

    def pull_back(
        self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int, cot_params: Tensors, cot_slots: Slots
    ) -> tuple[Tensors, Slots, Tensors]:
        to_params, to_momentum, to_grads = {}, {}, {}
        for name, cot in cot_params.items():
            if self.momentum == 0:
                cot_d = cot.mul(-lr)
            else:
                # m' reaches p' with -lr (times momentum under Nesterov, where d reaches p' directly too).
                cot_m = cot_slots["momentum_buffer"][name].add(
                    cot, alpha=-lr * (self.momentum if self.nesterov else 1.0)
                )
                to_momentum[name] = cot_m.mul(self.momentum)
                cot_d = cot_m.add(cot, alpha=-lr) if self.nesterov else cot_m
            to_grads[name] = cot_d
            to_params[name] = cot.clone() if self.weight_decay == 0 else cot.add(cot_d, alpha=self.weight_decay)
        return to_params, ({"momentum_buffer": to_momentum} if self.momentum != 0 else {}), to_grads


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW, with `eps_root` inside the square root.

        m' = b1 m + (1 - b1) g;   v' = b2 v + (1 - b2) g^2;   mhat = m' / (1 - b1^k);   vhat = v' / (1 - b2^k);   k = step + 1
        p' = (1 - lr * weight_decay) p - lr * mhat / (sqrt(vhat + eps_root) + eps)

    The square root has no derivative where `vhat + eps_root` is exactly 0 (a coordinate whose gradient has always been 0); its
    branch is dropped there, so that such a coordinate contributes 0 and not NaN.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_root: float = 1e-8
    weight_decay: float = 0.01

    def init(self, params: Tensors) -> Slots:
        return {slot: {name: torch.zeros_like(p) for name, p in params.items()} for slot in ("exp_avg", "exp_avg_sq")}

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        correction1, _ = self._corrections(step)
        new_params, new_m, new_v = {}, {}, {}
        for name, p in params.items():
            m, v = self._moments(slots, grads, name)
            _, denominator = self._denominator(v, step)
            new_params[name] = p.mul(1 - lr * self.weight_decay).addcdiv(m, denominator, value=-lr / correction1)
            new_m[name], new_v[name] = m, v
        return new_params, {"exp_avg": new_m, "exp_avg_sq": new_v}

    def pull_back(
        self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int, cot_params: Tensors, cot_slots: Slots
    ) -> tuple[Tensors, Slots, Tensors]:
        (b1, b2), (correction1, correction2) = self.betas, self._corrections(step)
        to_params, to_m, to_v, to_grads = {}, {}, {}, {}
        for name, cot in cot_params.items():
            m, v = self._moments(slots, grads, name)
            root, denominator = self._denominator(v, step)
            # These three are shared by all lanes: dp'/dm', dp'/dv' and dv'/dg.
            by_m = denominator.reciprocal().mul_(-lr / correction1)
            by_v = m.div(denominator).mul_(by_m).div_(root).mul_(-0.5 / correction2)
            by_v.masked_fill_(root == 0, 0.0)
            by_g = grads[name].mul(2 * (1 - b2))
            cot_m = torch.addcmul(cot_slots["exp_avg"][name], cot, by_m)
            cot_v = torch.addcmul(cot_slots["exp_avg_sq"][name], cot, by_v)
            to_grads[name] = cot_m.mul(1 - b1).addcmul_(cot_v, by_g)
            to_m[name], to_v[name] = cot_m.mul_(b1), cot_v.mul_(b2)
            to_params[name] = cot.mul(1 - lr * self.weight_decay)
        return to_params, {"exp_avg": to_m, "exp_avg_sq": to_v}, to_grads

    def _corrections(self, step: int) -> tuple[float, float]:
        return 1 - self.betas[0] ** (step + 1), 1 - self.betas[1] ** (step + 1)

    def _moments(self, slots: Slots, grads: Tensors, name: str) -> tuple[Tensor, Tensor]:
        (b1, b2), g = self.betas, grads[name]
        m = slots["exp_avg"][name].lerp(g, 1 - b1)
        v = slots["exp_avg_sq"][name].mul(b2).addcmul(g, g, value=1 - b2)
        return m, v

    def _denominator(self, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """(sqrt(vhat + eps_root), the same plus eps)."""
        root = v.div(self._corrections(step)[1]).add_(self.eps_root).sqrt_()
        return root, root.add(self.eps)


def clip(grads: Tensors, max_norm: float | None, ranks: Ranks = ALL) -> Tensors:
    """The gradients scaled to a global norm of at most `max_norm`; with more than one rank, of the hosted pieces.

    Raises:
        NonFiniteError: the norm is NaN or infinite.
    """
    if max_norm is None:
        return grads
    coefficient = max_norm / (_global_norm(grads, ranks) + 1e-6)
    # The norm decides for all tensors at once; a scalar branch is exact where torch's clamp multiplies by 1.
    return grads if float(coefficient) >= 1 else {name: g * coefficient for name, g in grads.items()}


def clip_pull_back(grads: Tensors, max_norm: float | None, cot_grads: Tensors, ranks: Ranks = ALL) -> Tensors:
    """The cotangent `[lanes, *shape]` of the clipped gradients to that of the gradients before clipping.

    c = max_norm / (n + 1e-6);   to_g = c * cot - (c / (n + 1e-6) / n) * <g, cot> * g      where c < 1
    """
    if max_norm is None:
        return cot_grads
    norm = _global_norm(grads, ranks)
    coefficient = max_norm / (norm + 1e-6)
    if float(coefficient) >= 1:
        return cot_grads
    lanes = len(next(iter(cot_grads.values())))
    inner = _sum_over_ranks(
        ranks,
        {
            rank: torch.stack([_inner(ranks.owned(grads, rank), cot_grads, lane) for lane in range(lanes)])
            for rank in ranks.hosted
        },
    )
    along = inner * (coefficient / (norm + 1e-6) / norm)
    return {
        name: torch.mul(cot, coefficient).sub_(along.view(-1, *[1] * grads[name].dim()) * grads[name])
        for name, cot in cot_grads.items()
    }


def _inner(grads: Tensors, cot_grads: Tensors, lane: int) -> Tensor:
    """<g, cot> of one lane: a reduction, never a matrix product over lanes, whose blocking would let a lane's position change bits."""
    return torch.stack([(cot_grads[name][lane] * g).sum() for name, g in grads.items()]).sum()


def _sum_over_ranks(ranks: Ranks, mine: Mapping[int, Tensor]) -> Tensor:
    if ranks.count == 1:
        return mine[0]
    every = ranks.of_all(torch.stack(list(mine.values())))
    total = every[0]
    for rank in range(1, ranks.count):
        total = total + every[rank]
    return total


def _global_norm(grads: Tensors, ranks: Ranks) -> Tensor:
    mine = [
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in ranks.owned(grads, rank).values()]))
        for rank in ranks.hosted
    ]
    norm: Tensor = mine[0] if ranks.count == 1 else torch.linalg.vector_norm(ranks.of_all(torch.stack(mine)))
    if not torch.isfinite(norm):
        bad = [name for name, g in grads.items() if not torch.isfinite(g).all()]
        raise NonFiniteError(
            f"the gradient's global norm is {float(norm)}; not finite in {', '.join(bad[:5]) or 'the sum'}"
        )
    return norm


OPTIMIZERS: Mapping[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}
