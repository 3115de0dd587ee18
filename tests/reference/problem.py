"""A small training run as plain data: what the references and the code under test are both given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any
ExampleLosses = Callable[[nn.Module, Batch], Tensor]
Measurement = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    Args:
        batch: what `Problem.example_losses` takes.
        units: `[rows]` int64, the weight that each row's loss is multiplied with.
        size: its part of the batch's denominator (rows, or target tokens).
        seed: of the generator that dropout draws from.
    """

    batch: Batch
    units: Tensor
    size: float
    seed: int


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD` without dampening: `d = g + weight_decay p`, `m = momentum m + d`, `p -= lr m`."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW` with `eps_root` added to the bias-corrected second moment, inside the square root."""

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    eps_root: float = 1e-8
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Problem:
    """One training run and its queries.

    Args:
        build: makes the initial model, the same each time.
        example_losses: `(module, batch) -> [rows]`, unweighted.
        steps: the micro-batches of every step.
        learning_rates: one a step.
        measurements: one a query; each takes the trained module in eval mode and gives a scalar.
        units: the number of weights, that is of score rows.
        clip_norm: the largest global gradient norm, or None.
        train_mode: whether training runs in the module's train mode.
    """

    build: Callable[[], nn.Module]
    example_losses: ExampleLosses
    steps: Sequence[Sequence[MicroBatch]]
    optimizer: SGD | AdamW
    learning_rates: Sequence[float]
    measurements: Sequence[Measurement]
    units: int
    clip_norm: float | None = None
    train_mode: bool = True

    @property
    def weights(self) -> Tensor:
        """`[units]` ones: those of the real run."""
        return torch.ones(self.units, dtype=torch.float64)


def micro_batches(
    rows: Tensor,
    *,
    count: int,
    gather: Callable[[Tensor], Batch],
    size: Callable[[Batch], float],
    seed: int,
    smallest: int = 1,
) -> tuple[MicroBatch, ...]:
    """Split one batch's `rows` into at most `count` micro-batches of at least `smallest` rows.

    Args:
        gather: makes the batch of some rows.
        size: what a batch adds to the denominator.
    """
    count = max(1, min(count, len(rows) // smallest))
    batches = [gather(part) for part in torch.tensor_split(rows, count)]
    return tuple(
        MicroBatch(batch, part.clone(), size(batch), seed=seed * 101 + index)
        for index, (batch, part) in enumerate(zip(batches, torch.tensor_split(rows, count), strict=True))
    )


def denominator(parts: Sequence[MicroBatch]) -> float:
    """What a step's weighted sum of losses is divided by: the whole batch's size, so that micro-batches add up."""
    return sum(part.size for part in parts)
