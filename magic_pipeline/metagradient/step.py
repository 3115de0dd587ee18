"""One training step, built from shards: micro-batches on logical ranks.

The loss of step t is `L_t = (1 / denom_t) * sum_i w_i * loss_i(params)`; `denom_t` never depends on the weights `w`. Shard s maps
`(params, buffers_s, w)` to `(g_s, buffers_{s+1})`; `g_t = sum_s g_s`; buffers are chained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from magic_pipeline.errors import InputError, NonFiniteError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.optimizers import Optimizer, clip
from magic_pipeline.metagradient.ranks import Ranks
from magic_pipeline.metagradient.state import Tensors, TrainState


@dataclass(frozen=True)
class Shard:
    """One micro-batch on one logical rank.

    Attributes:
        batch: any nesting of dicts, lists and tuples of tensors.
        units: int64, which unit each loss belongs to; equal ones share one weight. `[rows]`, or `[rows, tokens]` for packed rows,
            -1 where a loss belongs to no unit (its weight is 1, whatever the weights are).
        denominator: this shard's part of `denom_t`.
        seed: of the random draws in the forward.
        rank: the logical rank that makes it.
        places: `[rows, tokens]` int64, where each token's score goes if tokens have scores of their own (-1: nowhere); None where
            scores go by `units`.
    """

    batch: Any
    units: Tensor
    denominator: float
    seed: int
    rank: int = 0
    places: Tensor | None = None

    @property
    def score_places(self) -> Tensor:
        """Where scores go: `[rows]` or `[rows, tokens]`, -1 for nowhere."""
        return self.units if self.places is None else self.places


Data = Callable[[int], Sequence[Shard]]  # the shards of the ranks that this process hosts


@dataclass(frozen=True)
class Recipe:
    """How to make every step: `learning_rates[t]` is that of step t.

    With more than one rank the optimizer works on pieces (ranks.py), so it must treat every element alike.
    """

    model: FunctionalModel
    optimizer: Optimizer
    learning_rates: Sequence[float]
    clip_norm: float | None = None
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True)
class StepRecord:
    """What rematerialisation holds of one step, enough to pull back through it.

    Attributes:
        state: before the step.
        grads: the complete gradient, before clipping; with more than one rank, the pieces of those hosted here.
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
    ranks = recipe.ranks
    denominator = total_denominator(shards, state.step, ranks)
    buffers, counters = state.buffers, state.counters
    shard_buffers, shard_counters, losses = [], [], []
    grads: Tensors | None = None
    for rank in ranks.hosted:
        loss = 0.0
        local: dict[str, Tensor | None] = dict.fromkeys(state.params)
        for shard in (shard for shard in shards if shard.rank == rank):
            shard_buffers.append(buffers)
            shard_counters.append(counters)
            params = leaves(state.params)
            with torch.enable_grad():
                out = recipe.model.losses(params, buffers, counters, shard.batch, shard.seed)
                _check_rows(out.losses, shard)
                of_losses = None if weights is None else weights_by_unit(weights, shard.units).to(out.losses)
                shard_loss = weighted_loss(out.losses, of_losses, denominator)
                parts: Sequence[Tensor | None] = torch.autograd.grad(
                    shard_loss, list(params.values()), allow_unused=True
                )
            loss += float(shard_loss.detach())
            for (name, before), part in zip(local.items(), parts, strict=True):
                local[name] = part if before is None else before if part is None else before + part
            buffers, counters = {n: b.detach() for n, b in out.buffers.items()}, out.counters
        losses.append(loss)
        grads = _with_round(ranks, grads, local, state.params)
    total = ranks.total(losses, recipe.model.device)
    if not math.isfinite(total):
        raise NonFiniteError(f"the loss of training step {state.step} is {total}")
    record = StepRecord(state, grads or {}, tuple(shard_buffers), tuple(shard_counters), total)
    return _update(recipe, record, buffers, counters), record


def _with_round(ranks: Ranks, grads: Tensors | None, local: Mapping[str, Tensor | None], like: Tensors) -> Tensors:
    """The gradient with the part of one rank of each process. A parameter that nobody uses has the gradient 0."""
    if ranks.count == 1:
        return {name: torch.zeros_like(like[name]) if part is None else part for name, part in local.items()}
    if grads is None:
        grads = {name: torch.zeros_like(piece) for name, piece in ranks.cut(like).items()}
    ranks.add(grads, list(local.values()), like)
    return grads


def _check_rows(losses: Tensor, shard: Shard) -> None:
    """A single loss for a whole batch would be broadcast over the rows' weights: wrong scores, and no error."""
    if len(losses) != len(shard.units):
        raise InputError(f"example_losses gave {len(losses)} losses for {len(shard.units)} rows", field="task")
    for units in (shard.units, shard.score_places):
        if units.dim() == 2 and losses.shape != units.shape:
            found, wanted = list(losses.shape), list(units.shape)
            raise InputError(f"example_losses gave {found}; for scores of tokens it should give {wanted}", field="task")


def weights_by_unit(weights: Tensor, units: Tensor) -> Tensor:
    """`[..., units]` to `[..., *units.shape]`: the weight of each loss. Rows of other ranks' blocks are those of the first."""
    found = weights[..., (units % weights.shape[-1]).to(weights.device)]
    return torch.where((units < 0).to(weights.device), torch.ones_like(found), found) if units.dim() > 1 else found


def over_losses(by_unit: Tensor, losses: Tensor) -> Tensor:
    """A row's weight over its tokens, where losses have tokens and weights have none."""
    return by_unit.reshape(*by_unit.shape, *[1] * (losses.dim() - by_unit.dim()))


def _update(recipe: Recipe, record: StepRecord, buffers: Tensors, counters: Tensors) -> TrainState:
    state, step, ranks = record.state, record.state.step, recipe.ranks
    try:
        grads = clip(record.grads, recipe.clip_norm, ranks)
    except NonFiniteError as error:
        raise NonFiniteError(f"training step {step}: {error}") from error
    with torch.no_grad():
        pieces, slots = recipe.optimizer.update(
            ranks.cut(state.params), state.slots, grads, recipe.learning_rates[step], step
        )
        params = ranks.join(pieces, state.params)
    return TrainState(step + 1, params, slots, buffers, counters)


def total_denominator(shards: Sequence[Shard], step: int, ranks: Ranks) -> float:
    """`denom_t`, the sum over all shards of a step, on all ranks."""
    device = shards[0].units.device if shards else torch.device("cpu")
    mine = [sum(shard.denominator for shard in shards if shard.rank == rank) for rank in ranks.hosted]
    total = ranks.total(mine, device)
    if not (math.isfinite(total) and total > 0):
        raise InputError(
            f"the batch of training step {step} has the denominator {total}; expected more than 0", field="task"
        )
    return total


def weighted_loss(losses: Tensor, weights: Tensor | None, denominator: float | Tensor) -> Tensor:
    """A shard's part of `L_t`, a scalar."""
    return (losses if weights is None else over_losses(weights, losses) * losses).sum() / denominator


def leaves(tensors: Tensors) -> dict[str, Tensor]:
    """The same values as leaves of a new graph."""
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
