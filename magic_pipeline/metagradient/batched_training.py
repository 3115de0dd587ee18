"""Many training runs at once, which differ in nothing but the weights of their examples: retraining on subsets of the data.

Every tensor of a *batched state* has a leading axis of runs: a `TrainState` whose tensors are `[runs, *shape]`. One forward under
torch.func.vmap serves all runs, and one backward of the sum of their losses gives every run its own gradient, since no run's loss
depends on another's parameters. Dropout draws the same numbers in all runs, by the shards' seeds, as retraining one by one would.

A step here equals `train_step` of each run to rounding. Where torch.func.vmap does not take the model, retraining goes one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from magic_pipeline.errors import NonFiniteError
from magic_pipeline.metagradient.model import FunctionalModel, Losses
from magic_pipeline.metagradient.ranks import Ranks
from magic_pipeline.metagradient.state import Tensors, TrainState
from magic_pipeline.metagradient.step import (
    Recipe,
    Shard,
    leaves,
    over_losses,
    total_denominator,
    train_step,
    weights_by_unit,
)

_ONE_RANK = Ranks()


def repeated(recipe: Recipe, initial: TrainState, runs: int) -> TrainState:
    """The state before step 0, `runs` times. Optimizer slots are whole: logical ranks do not divide this work."""
    params = {name: _repeat(tensor, runs) for name, tensor in initial.params.items()}
    return TrainState(
        initial.step,
        params,
        recipe.optimizer.init(params),
        {name: _repeat(tensor, runs) for name, tensor in initial.buffers.items()},
        {name: _repeat(tensor, runs) for name, tensor in initial.counters.items()},
    )


def batched_step(
    recipe: Recipe, state: TrainState, shards: Sequence[Shard], weights: Tensor
) -> tuple[TrainState, Tensor]:
    """Step `state.step` of all runs, and their losses.

    Args:
        state: every tensor `[runs, *shape]`.
        shards: of all logical ranks.
        weights: `[runs, units]`, on the model's device.

    Returns:
        The next state, and the losses `[runs]`. A run whose loss or gradient is NaN or infinite stays so and touches no other:
        the caller looks at the losses.

    Raises:
        InputError: the batch has a denominator of 0.
        RuntimeError: torch.func.vmap does not take an operation of the model.
    """
    grads, after = batched_gradient(recipe, state, shards, weights)
    with torch.no_grad():
        clipped = _clip_each(grads, recipe.clip_norm)
        moved, slots = recipe.optimizer.update(
            state.params, state.slots, clipped, recipe.learning_rates[state.step], state.step
        )
    return TrainState(state.step + 1, moved, slots, after.buffers, after.counters), after.losses


def batched_gradient(
    recipe: Recipe, state: TrainState, shards: Sequence[Shard], weights: Tensor
) -> tuple[Tensors, Losses]:
    """Every run's gradient before clipping `[runs, *shape]`, and its losses `[runs]`, buffers and counters after the step.

    Arguments and errors as `batched_step`.
    """
    denominator = total_denominator([replace(shard, rank=0) for shard in shards], state.step, _ONE_RANK)
    params = leaves(state.params)
    buffers, counters = state.buffers, state.counters
    grads: dict[str, Tensor | None] = dict.fromkeys(params)
    total = weights.new_zeros(len(weights))
    for shard in shards:
        with torch.enable_grad():
            out = _losses(recipe.model, params, buffers, counters, shard)
            of_losses = over_losses(weights_by_unit(weights, shard.units), out.losses)
            losses = (of_losses * out.losses).flatten(1).sum(1) / denominator
            parts: Sequence[Tensor | None] = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
        total = total + losses.detach()
        for (name, before), part in zip(grads.items(), parts, strict=True):
            grads[name] = part if before is None else before if part is None else before + part
        buffers, counters = {n: b.detach() for n, b in out.buffers.items()}, out.counters
    whole = {name: torch.zeros_like(state.params[name]) if g is None else g for name, g in grads.items()}
    return whole, Losses(total, buffers, counters)


def separate_step(
    recipe: Recipe, state: TrainState, shards: Sequence[Shard], weights: Tensor
) -> tuple[TrainState, Tensor]:
    """`batched_step`, one run after the other by `train_step`: for models that torch.func.vmap does not take.

    A run that is not finite gets the loss NaN, and NaN in all its parameters.
    """
    alone, whole = replace(recipe, ranks=_ONE_RANK), [replace(shard, rank=0) for shard in shards]
    states, losses = list[TrainState](), list[float]()
    for index, of_run in enumerate(weights):
        before = run_of(state, index)
        try:
            after, record = train_step(alone, before, whole, of_run)
            losses.append(record.loss)
        except NonFiniteError:
            after = replace(before, step=before.step + 1, params={n: p * torch.nan for n, p in before.params.items()})
            losses.append(float("nan"))
        states.append(after)
    flat = [after.flat() for after in states]
    stacked = {name: torch.stack([one[name] for one in flat]) for name in flat[0]}
    return TrainState.from_flat(state.step + 1, stacked), weights.new_tensor(losses)


def batched_measurement(model: FunctionalModel, state: TrainState, function: Callable[[nn.Module], Tensor]) -> Tensor:
    """`[runs]`: `function(module)`, a scalar, of every run's model, in eval mode.

    Raises:
        RuntimeError: torch.func.vmap does not take an operation of the measurement.
    """

    def one(params: Tensors, buffers: Tensors) -> Tensor:
        return model.measurement(params, buffers, function)

    with torch.no_grad():
        values: Tensor = torch.func.vmap(one, randomness="same")(state.params, state.buffers)
    return values


def run_of(state: TrainState, index: int) -> TrainState:
    """One run's state, as views."""
    return TrainState.from_flat(state.step, {name: tensor[index] for name, tensor in state.flat().items()})


def _losses(model: FunctionalModel, params: Tensors, buffers: Tensors, counters: Tensors, shard: Shard) -> Losses:
    """As `FunctionalModel.losses`, with a leading axis of runs: losses `[runs, rows]`."""

    def one(params: Tensors, buffers: Tensors, counters: Tensors) -> tuple[Tensor, Tensors, Tensors]:
        out = model.losses(params, buffers, counters, shard.batch, shard.seed)
        return out.losses, out.buffers, out.counters

    batched: Any = torch.func.vmap(one, randomness="same")
    return Losses(*batched(dict(params), dict(buffers), dict(counters)))


def _clip_each(grads: Tensors, max_norm: float | None) -> Tensors:
    """`optimizers.clip` of every run's gradient by its own norm."""
    if max_norm is None:
        return grads
    norms = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]), dim=0
    )
    coefficients = (max_norm / (norms + 1e-6)).clamp(max=1)
    return {name: g * coefficients.view(-1, *[1] * (g.dim() - 1)) for name, g in grads.items()}


def _repeat(tensor: Tensor, runs: int) -> Tensor:
    return tensor.unsqueeze(0).repeat(runs, *[1] * tensor.dim())
