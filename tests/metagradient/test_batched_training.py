"""Many trainings at once give what each gives alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.metagradient.batched_training import (
    batched_measurement,
    batched_step,
    repeated,
    run_of,
    separate_step,
)
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.numerics import shard_seed
from magic_pipeline.metagradient.optimizers import SGD, AdamW, Optimizer
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import Recipe, Shard, train_step

ROWS, FEATURES, CLASSES, STEPS, RUNS = 12, 5, 3, 4, 3
ADAMW, SGD_MOMENTUM = AdamW(eps_root=1e-6), SGD(momentum=0.9, nesterov=True, weight_decay=0.1)


def module(middle: str) -> nn.Module:
    torch.manual_seed(0)
    if middle == "conv":
        return nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(12, CLASSES)
        )
    between = {"plain": nn.Identity(), "dropout": nn.Dropout(0.4), "batch norm": nn.BatchNorm1d(6)}[middle]
    return nn.Sequential(nn.Linear(FEATURES, 6), between, nn.Tanh(), nn.Linear(6, CLASSES))


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def recipe_of(middle: str, dtype: torch.dtype, optimizer: Optimizer, clip: float | None) -> Recipe:
    model = FunctionalModel(module(middle), example_losses=losses_of, dtype=dtype)
    return Recipe(model, optimizer, [0.01] * STEPS, clip)


def data(step: int, microbatch: int) -> Sequence[Shard]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    rows = torch.randperm(ROWS, generator=generator)
    starts = range(0, ROWS, microbatch)
    parts = [(at, slice(at, at + microbatch)) for at in starts]
    return [
        Shard({"x": x[part], "y": y[part]}, rows[part], microbatch, shard_seed(0, step, 0, at)) for at, part in parts
    ]


def weights(dtype: torch.dtype) -> Tensor:
    kept = torch.ones(RUNS, ROWS, dtype=dtype)
    kept[1, :4], kept[2, 3:9] = 0, 0
    return kept


CASES = [
    ("plain", ADAMW, None, ROWS),
    ("plain", ADAMW, 0.5, 4),
    ("plain", SGD_MOMENTUM, 0.5, ROWS),
    ("dropout", ADAMW, None, 4),
    ("batch norm", ADAMW, None, 6),
    ("conv", SGD_MOMENTUM, None, 4),
]


@pytest.mark.parametrize(("middle", "optimizer", "clip", "microbatch"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_each_run_is_what_train_step_makes_of_it_alone(
    middle: str, optimizer: Optimizer, clip: float | None, microbatch: int, dtype: torch.dtype, tolerance: float
) -> None:
    recipe = recipe_of(middle, dtype, optimizer, clip)
    initial = recipe.model.initial_state(optimizer, data(0, microbatch)[0].batch)
    together, kept = repeated(recipe, initial, RUNS), weights(dtype)
    alone = [initial] * RUNS
    for step in range(STEPS):
        shards = data(step, microbatch)
        together, losses = batched_step(recipe, together, shards, kept)
        made = [train_step(recipe, state, shards, kept[run]) for run, state in enumerate(alone)]
        alone = [state for state, _ in made]
        assert losses.tolist() == pytest.approx([record.loss for _, record in made], rel=tolerance)
    for run, state in enumerate(alone):
        assert largest_difference(run_of(together, run), state) <= tolerance
    assert largest_difference(run_of(together, 0), alone[1]) > 1e-3, "the runs do not differ: nothing was compared"


def test_measurements_are_those_of_each_model_alone() -> None:
    recipe = recipe_of("batch norm", torch.float64, ADAMW, None)
    state = repeated(recipe, recipe.model.initial_state(ADAMW, data(0, ROWS)[0].batch), RUNS)
    state, _ = batched_step(recipe, state, data(0, ROWS), weights(torch.float64))
    batch = data(9, ROWS)[0].batch

    def phi(model: nn.Module) -> Tensor:
        return losses_of(model, batch).mean()

    found = batched_measurement(recipe.model, state, phi)
    alone = [recipe.model.measurement(run.params, run.buffers, phi) for run in (run_of(state, r) for r in range(RUNS))]
    assert found.tolist() == pytest.approx([float(one) for one in alone], rel=1e-13)
    assert len(set(found.tolist())) == RUNS


def test_one_run_that_blows_up_touches_no_other() -> None:
    recipe = recipe_of("plain", torch.float64, ADAMW, 1.0)
    initial = recipe.model.initial_state(ADAMW, data(0, ROWS)[0].batch)
    good, bad = weights(torch.float64), weights(torch.float64)
    bad[1] = float("inf")
    expected, _ = batched_step(recipe, repeated(recipe, initial, RUNS), data(0, ROWS), good)
    for step in (batched_step, separate_step):
        found, losses = step(recipe, repeated(recipe, initial, RUNS), data(0, ROWS), bad)
        assert torch.isfinite(losses).tolist() == [True, False, True]
        assert not torch.isfinite(found.params["0.weight"][1]).any()
        for run in (0, 2):
            assert largest_difference(run_of(found, run), run_of(expected, run)) < 1e-14


def test_the_ambient_random_numbers_are_left_alone() -> None:
    recipe = recipe_of("dropout", torch.float64, ADAMW, None)
    state = repeated(recipe, recipe.model.initial_state(ADAMW, data(0, ROWS)[0].batch), RUNS)
    before = torch.get_rng_state()
    batched_step(recipe, state, data(0, ROWS), weights(torch.float64))
    assert torch.equal(before, torch.get_rng_state())


def largest_difference(found: TrainState, expected: TrainState) -> float:
    """Relative to the largest value of each kind: a bias before a BatchNorm has nothing but rounding in its slots."""
    worst = 0.0
    assert found.flat().keys() == expected.flat().keys()
    kinds = {name: name.rpartition("/")[0] for name in expected.flat()}
    for kind in set(kinds.values()):
        names = [name for name in kinds if kinds[name] == kind]
        off = max(float((found.flat()[name] - expected.flat()[name]).abs().max()) for name in names)
        scale = max(float(expected.flat()[name].abs().max()) for name in names)
        worst = max(worst, off / scale if scale > 0 else off)
    return worst
