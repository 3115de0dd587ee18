"""SGD, AdamW and clipping as differentiable formulas, out of place, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from tests.reference.problem import SGD, AdamW

Slots = dict[str, Tensor]


def fresh_slots(optimizer: SGD | AdamW, parameter: Tensor) -> Slots:
    names = ("exp_avg", "exp_avg_sq") if isinstance(optimizer, AdamW) else ("momentum_buffer",)
    return {name: torch.zeros_like(parameter) for name in names}


def sgd(setting: SGD, parameter: Tensor, slots: Slots, grad: Tensor, lr: float) -> tuple[Tensor, Slots]:
    """One step of Sutskever's momentum as `torch.optim.SGD` has it; the first buffer is the gradient itself."""
    direction = grad + setting.weight_decay * parameter
    buffer = setting.momentum * slots["momentum_buffer"] + direction
    direction = direction + setting.momentum * buffer if setting.nesterov else buffer
    return parameter - lr * direction, {"momentum_buffer": buffer}


def adamw(setting: AdamW, parameter: Tensor, slots: Slots, grad: Tensor, lr: float, step: int) -> tuple[Tensor, Slots]:
    """Loshchilov & Hutter's algorithm 2. `step` counts from 0.

    Where the second moment plus eps_root is exactly 0, the square root is a constant 0: its one-sided derivative is
    infinite there, and the coordinate's gradient has never been anything but 0.
    """
    beta1, beta2 = setting.betas
    first = beta1 * slots["exp_avg"] + (1 - beta1) * grad
    second = beta2 * slots["exp_avg_sq"] + (1 - beta2) * grad**2
    radicand = second / (1 - beta2 ** (step + 1)) + setting.eps_root
    never = radicand == 0
    root = torch.where(
        never, torch.zeros_like(radicand), torch.where(never, torch.ones_like(radicand), radicand) ** 0.5
    )
    move = first / (1 - beta1 ** (step + 1)) / (root + setting.eps)
    decayed = parameter - lr * setting.weight_decay * parameter
    return decayed - lr * move, {"exp_avg": first, "exp_avg_sq": second}


def clip_coefficient(grads: list[Tensor], max_norm: float) -> Tensor:
    """`min(1, max_norm / (norm + 1e-6))` of all gradients together, as `torch.nn.utils.clip_grad_norm_`."""
    squares = torch.stack([(grad**2).sum() for grad in grads]).sum()
    if squares == 0:
        return torch.ones_like(squares)
    ratio = max_norm / (squares.sqrt() + 1e-6)
    return ratio if ratio < 1 else torch.ones_like(ratio)


@contextmanager
def without_the_cast() -> Iterator[None]:
    """torch.optim.Muon in the dtype of its gradients: a copy in place of its cast to bfloat16."""
    with patch.object(Tensor, "bfloat16", lambda tensor: tensor.clone()):
        yield
