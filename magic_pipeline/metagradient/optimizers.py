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
    """Stochastic gradient descent with momentum and coupled weight decay, as torch.optim.SGD.

    d = g + weight_decay * p;   m' = momentum * m + (1 - dampening) * d, the first one d itself;
    p' = p - lr * (d + momentum * m'  if nesterov else m')
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0

    def init(self, params: Tensors) -> Slots:
        if self.momentum == 0:
            return {}
        return {"momentum_buffer": {name: torch.zeros_like(p) for name, p in params.items()}}

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        new_params, new_momentum = {}, {}
        for name, p in params.items():
            d = grads[name] if self.weight_decay == 0 else grads[name].add(p, alpha=self.weight_decay)
            if self.momentum != 0:
                m = slots["momentum_buffer"][name].mul(self.momentum).add(d, alpha=self._fresh(step))
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
                cot_m = cot_m if self._fresh(step) == 1 else cot_m.mul(self._fresh(step))
                cot_d = cot_m.add(cot, alpha=-lr) if self.nesterov else cot_m
            to_grads[name] = cot_d
            to_params[name] = cot.clone() if self.weight_decay == 0 else cot.add(cot_d, alpha=self.weight_decay)
        return to_params, ({"momentum_buffer": to_momentum} if self.momentum != 0 else {}), to_grads

    def _fresh(self, step: int) -> float:
        """The weight of d in the momentum."""
        return 1.0 if step == 0 else 1 - self.dampening


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


@dataclass(frozen=True)
class Adam(AdamW):
    """Adam with coupled weight decay, as torch.optim.Adam: AdamW without a decay of its own, of g + weight_decay * p."""

    weight_decay: float = 0.0

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        return self._without_decay().update(params, slots, _decayed(grads, params, self.weight_decay), lr, step)

    def pull_back(
        self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int, cot_params: Tensors, cot_slots: Slots
    ) -> tuple[Tensors, Slots, Tensors]:
        decayed = _decayed(grads, params, self.weight_decay)
        to_params, to_slots, to_grads = self._without_decay().pull_back(
            params, slots, decayed, lr, step, cot_params, cot_slots
        )
        return _decayed(to_params, to_grads, self.weight_decay), to_slots, to_grads

    def _without_decay(self) -> AdamW:
        return AdamW(self.betas, self.eps, self.eps_root, weight_decay=0.0)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad with coupled weight decay, as torch.optim.Adagrad, with `eps_root` inside the square root.

        d = g + weight_decay * p;   s' = s + d^2;   p' = p - lr / (1 + step * lr_decay) * d / (sqrt(s' + eps_root) + eps)

    Where `s' + eps_root` is exactly 0 the square root's branch is dropped, as in AdamW.
    """

    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    eps_root: float = 1e-8

    def init(self, params: Tensors) -> Slots:
        return {"sum": {name: torch.full_like(p, self.initial_accumulator_value) for name, p in params.items()}}

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        new_params, new_sum = {}, {}
        for name, d in _decayed(grads, params, self.weight_decay).items():
            total = slots["sum"][name].addcmul(d, d)
            denominator = total.add(self.eps_root).sqrt_().add(self.eps)
            new_params[name], new_sum[name] = params[name].addcdiv(d, denominator, value=-self._lr(lr, step)), total
        return new_params, {"sum": new_sum}

    def pull_back(
        self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int, cot_params: Tensors, cot_slots: Slots
    ) -> tuple[Tensors, Slots, Tensors]:
        to_sum, to_grads, rate = {}, {}, self._lr(lr, step)
        for name, d in _decayed(grads, params, self.weight_decay).items():
            root = slots["sum"][name].addcmul(d, d).add_(self.eps_root).sqrt_()
            denominator = root.add(self.eps)
            by_d = denominator.reciprocal().mul_(-rate)
            by_sum = _by_radicand(d, root, denominator).mul_(-rate)
            cot = cot_params[name]
            to_sum[name] = torch.addcmul(cot_slots["sum"][name], cot, by_sum)
            to_grads[name] = cot.mul(by_d).addcmul_(to_sum[name], d.mul(2))
        to_params = {name: cot.clone() for name, cot in cot_params.items()}
        return _decayed(to_params, to_grads, self.weight_decay), {"sum": to_sum}, to_grads

    def _lr(self, lr: float, step: int) -> float:
        return lr / (1 + step * self.lr_decay)


@dataclass(frozen=True)
class RMSprop:
    """RMSprop with coupled weight decay, as torch.optim.RMSprop, with `eps_root` inside the square root.

        d = g + weight_decay * p;   v' = alpha v + (1 - alpha) d^2;   a' = alpha a + (1 - alpha) d  (0 unless centered)
        u = d / (sqrt(v' - a'^2 + eps_root) + eps);   m' = momentum m + u;   p' = p - lr * m'

    Where the radicand is exactly 0 the square root's branch is dropped, as in AdamW.
    """

    alpha: float = 0.99
    eps: float = 1e-8
    eps_root: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def init(self, params: Tensors) -> Slots:
        names = [
            "square_avg",
            *(["grad_avg"] if self.centered else []),
            *(["momentum_buffer"] if self.momentum else []),
        ]
        return {slot: {name: torch.zeros_like(p) for name, p in params.items()} for slot in names}

    def update(self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int) -> tuple[Tensors, Slots]:
        new_params: dict[str, Tensor] = {}
        new_slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in slots}
        for name, d in _decayed(grads, params, self.weight_decay).items():
            squares, mean = self._averages(slots, d, name)
            move = d / self._root(squares, mean).add(self.eps)
            new_slots["square_avg"][name] = squares
            if mean is not None:
                new_slots["grad_avg"][name] = mean
            if self.momentum:
                move = new_slots["momentum_buffer"][name] = slots["momentum_buffer"][name].mul(self.momentum).add(move)
            new_params[name] = params[name].add(move, alpha=-lr)
        return new_params, new_slots

    def pull_back(
        self, params: Tensors, slots: Slots, grads: Tensors, lr: float, step: int, cot_params: Tensors, cot_slots: Slots
    ) -> tuple[Tensors, Slots, Tensors]:
        to_grads: dict[str, Tensor] = {}
        to_slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in slots}
        for name, d in _decayed(grads, params, self.weight_decay).items():
            squares, mean = self._averages(slots, d, name)
            root = self._root(squares, mean)
            denominator = root.add(self.eps)
            cot_move = cot_params[name].mul(-lr)
            if self.momentum:
                cot_move = cot_move.add_(cot_slots["momentum_buffer"][name])
                to_slots["momentum_buffer"][name] = cot_move.mul(self.momentum)
            cot_radicand = cot_move.mul(_by_radicand(d, root, denominator))
            cot_squares = cot_slots["square_avg"][name].add(cot_radicand)
            cot = cot_move.div(denominator).addcmul_(cot_squares, d.mul(2 * (1 - self.alpha)))
            to_slots["square_avg"][name] = cot_squares.mul_(self.alpha)
            if mean is not None:
                cot_mean = torch.addcmul(cot_slots["grad_avg"][name], cot_radicand, mean, value=-2)
                cot.add_(cot_mean, alpha=1 - self.alpha)
                to_slots["grad_avg"][name] = cot_mean.mul_(self.alpha)
            to_grads[name] = cot
        to_params = {name: cot.clone() for name, cot in cot_params.items()}
        return _decayed(to_params, to_grads, self.weight_decay), to_slots, to_grads

    def _averages(self, slots: Slots, d: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        squares = slots["square_avg"][name].mul(self.alpha).addcmul(d, d, value=1 - self.alpha)
        return squares, slots["grad_avg"][name].lerp(d, 1 - self.alpha) if self.centered else None

    def _root(self, squares: Tensor, mean: Tensor | None) -> Tensor:
        radicand = squares if mean is None else squares.addcmul(mean, mean, value=-1)
        return radicand.add(self.eps_root).sqrt_()


def _decayed(grads: Tensors, params: Tensors, weight_decay: float) -> Tensors:
    """g + weight_decay * p; `grads` themselves where there is no decay."""
    if weight_decay == 0:
        return grads
    return {name: g.add(params[name], alpha=weight_decay) for name, g in grads.items()}


def _by_radicand(d: Tensor, root: Tensor, denominator: Tensor) -> Tensor:
    """The derivative of `d / (sqrt(s) + eps)` in s, 0 where s is exactly 0."""
    return d.div(denominator).div_(denominator).div_(root).mul_(-0.5).masked_fill_(root == 0, 0.0)


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
