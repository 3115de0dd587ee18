"""Runs a reference problem with magic_pipeline: the only place here that knows both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from magic_pipeline.metagradient import optimizers
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.pullback import EAGER, Engine
from magic_pipeline.metagradient.segments import segment_boundaries
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import Data, Recipe, Shard, train_step
from magic_pipeline.metagradient.walk import Lanes, walk_segment
from tests.reference.problem import SGD, AdamW, Measurement, MicroBatch, Problem


def optimizer(setting: SGD | AdamW) -> optimizers.Optimizer:
    kind = optimizers.AdamW if isinstance(setting, AdamW) else optimizers.SGD
    return kind(**dataclasses.asdict(setting))


def recipe(problem: Problem) -> Recipe:
    model = FunctionalModel(
        problem.build(), example_losses=problem.example_losses, train_mode=problem.train_mode, dtype=torch.float64
    )
    return Recipe(model, optimizer(problem.optimizer), tuple(problem.learning_rates), problem.clip_norm)


def shard(part: MicroBatch) -> Shard:
    return Shard(part.batch, part.units, part.size, part.seed)


def data(problem: Problem) -> Data:
    return lambda step: [shard(part) for part in problem.steps[step]]


def initial_state(problem: Problem, recipe: Recipe) -> TrainState:
    return recipe.model.initial_state(recipe.optimizer, problem.steps[0][0].batch)


def train(problem: Problem, recipe: Recipe, weights: Tensor | None = None) -> list[TrainState]:
    """Every state, `[0]` before the first step and `[-1]` trained."""
    states = [initial_state(problem, recipe)]
    for step in range(len(problem.steps)):
        states.append(train_step(recipe, states[-1], data(problem)(step), weights)[0])
    return states


def query_cotangent(recipe: Recipe, state: TrainState, measurement: Measurement) -> dict[str, Tensor]:
    """d(measurement) / d(state), flat, as a lane takes it."""
    leaves = {name: value.clone().requires_grad_() for name, value in state.flat().items() if "counters/" not in name}
    params, buffers = (
        {name.removeprefix(kind): value for name, value in leaves.items() if name.startswith(kind)}
        for kind in ("params/", "buffers/")
    )
    phi = recipe.model.measurement(params, buffers, measurement)
    grads: Sequence[Tensor | None] = torch.autograd.grad(phi, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(leaves.items(), grads, strict=True)}


def joined(problem: Problem, recipe: Recipe, trained: TrainState, columns: Sequence[int | None]) -> Lanes:
    """Lanes at the end of the run: lane i holds query `columns[i]`, or nobody."""
    lanes = Lanes.empty(trained, len(columns), problem.units)
    for lane, column in enumerate(columns):
        if column is not None:
            start = query_cotangent(recipe, trained, problem.measurements[column])
            lanes.join(lane, start, torch.zeros(problem.units, dtype=torch.float64))
    return lanes


def walk(
    problem: Problem,
    *,
    chunk: int = 1,
    columns: Sequence[int | None] | None = None,
    segment_steps: int | None = None,
    hold: int | None = None,
    engine: Engine = EAGER,
) -> Tensor:
    """Train, then walk all the way back: `scores [units, lanes]`; `columns` says which query is in which lane."""
    run = recipe(problem)
    states = train(problem, run)
    lanes = joined(problem, run, states[-1], range(len(problem.measurements)) if columns is None else columns)
    boundaries = segment_boundaries(len(problem.steps), segment_steps)
    for start, stop in reversed(list(pairwise(boundaries))):
        for _ in walk_segment(run, data(problem), states[start], stop, lanes, chunk=chunk, hold=hold, engine=engine):
            pass
    return lanes.scores.T


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, each query's relative to its own largest expected score, which must not be tiny.

    Raises:
        AssertionError: a query's largest score is so small that agreement would prove nothing.
    """
    largest = expected.abs().amax(0)
    assert found.shape == expected.shape
    assert float(largest.min()) > 1e-3, f"scores vanish: {largest.tolist()}"
    return float(((found - expected).abs() / largest).max())
