"""One training step, built from shards: micro-batches now, logical ranks by the same path.

The loss of step t is `L_t = (1 / denom_t) * sum_i w_i * loss_i(params)`; `denom_t` never depends on the weights `w`. Shard s maps
`(params, buffers_s, w)` to `(g_s, buffers_{s+1})`; `g_t = sum_s g_s`; buffers are chained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magic_pipeline.errors import InputError, NonFiniteError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.optimizers import Optimizer, clip
from magic_pipeline.metagradient.state import Tensors, TrainState


@dataclass(frozen=True)
class Shard:
    """One micro-batch on one logical rank.

    Attributes:
        batch: any nesting of dicts, lists and tuples of tensors.
        units: `[rows]` int64, the score row of each example; equal rows share one weight.
        denominator: this shard's part of `denom_t`.
        seed: of the random draws in the forward.
    """

    batch: Any
    units: Tensor
    denominator: float
    seed: int


Data = Callable[[int], Sequence[Shard]]


@dataclass(frozen=True)
class Recipe:
    """How to make every step: `learning_rates[t]` is that of step t."""

    model: FunctionalModel
    optimizer: Optimizer
    learning_rates: Sequence[float]
    clip_norm: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """What rematerialisation holds of one step, enough to pull back through it.

    Attributes:
        state: before the step.
        grads: the complete gradient, before clipping.
        shard_buffers: the float buffers that each shard started from.
        shard_counters: the integer buffers that each shard started from.
        loss: `L_t`.
    """

    state: TrainState
    grads: Tensors
    shard_buffers: tuple[Tensors, ...]
    shard_counters: tuple[Tensors, ...]
    loss: float


def train_step(
    recipe: Recipe, state: TrainState, shards: Sequence[Shard], weights: Tensor | None = None
) -> tuple[TrainState, StepRecord]:
    """Makes step `state.step`.

    Args:
        weights: `[units]`, the weight of each unit; None means 1 everywhere.

    Raises:
        NonFiniteError: the loss or the gradient is NaN or infinite; names the step.
        InputError: the batch has a denominator of 0, or another number of losses than rows.
    """
    denominator = total_denominator(shards, state.step)
    buffers, counters = state.buffers, state.counters
    shard_buffers, shard_counters, loss = [], [], 0.0
    grads: dict[str, Tensor] = {}
    for shard in shards:
        shard_buffers.append(buffers)
        shard_counters.append(counters)
        params = leaves(state.params)
        with torch.enable_grad():
            out = recipe.model.losses(params, buffers, counters, shard.batch, shard.seed)
            _check_rows(out.losses, shard.units)
            row_weights = None if weights is None else weights[shard.units].to(out.losses)
            shard_loss = weighted_loss(out.losses, row_weights, denominator)
            parts: Sequence[Tensor | None] = torch.autograd.grad(shard_loss, list(params.values()), allow_unused=True)
        loss += float(shard_loss.detach())
        for (name, param), part in zip(params.items(), parts, strict=True):
            # A parameter that this shard does not use has the gradient 0.
            complete = torch.zeros_like(param) if part is None else part
            grads[name] = grads[name] + complete if name in grads else complete
        buffers, counters = {n: b.detach() for n, b in out.buffers.items()}, out.counters
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss of training step {state.step} is {loss}")
    record = StepRecord(state, grads, tuple(shard_buffers), tuple(shard_counters), loss)
    return _update(recipe, record, buffers, counters), record


def _check_rows(losses: Tensor, units: Tensor) -> None:
    """A single loss for a whole batch would be broadcast over the rows' weights: wrong scores, and no error."""
    if losses.shape != units.shape:
        raise InputError(f"example_losses gave {len(losses)} losses for {len(units)} rows", field="task")


def _update(recipe: Recipe, record: StepRecord, buffers: Tensors, counters: Tensors) -> TrainState:
    state, step = record.state, record.state.step
    try:
        grads = clip(record.grads, recipe.clip_norm)
    except NonFiniteError as error:
        raise NonFiniteError(f"training step {step}: {error}") from error
    with torch.no_grad():
        params, slots = recipe.optimizer.update(state.params, state.slots, grads, recipe.learning_rates[step], step)
    return TrainState(step + 1, params, slots, buffers, counters)


def total_denominator(shards: Sequence[Shard], step: int) -> float:
    """`denom_t`, the sum over all shards of a step."""
    total = sum(shard.denominator for shard in shards)
    if not (math.isfinite(total) and total > 0):
        raise InputError(
            f"the batch of training step {step} has the denominator {total}; expected more than 0", field="task"
        )
    return total


def weighted_loss(losses: Tensor, weights: Tensor | None, denominator: float) -> Tensor:
    """A shard's part of `L_t`, a scalar."""
    return (losses if weights is None else weights * losses).sum() / denominator


def leaves(tensors: Tensors) -> dict[str, Tensor]:
    """The same values as leaves of a new graph."""
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
