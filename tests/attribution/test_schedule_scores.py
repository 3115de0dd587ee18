"""Whole experiments with every schedule, and with dropout: scores are central differences of an ordinary training.

The ordinary training is torch.optim's, its learning rates those of transformers' scheduler.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.metagradient.numerics import shard_seed
from tests.attribution.running import open_small, run
from tests.metagradient.test_schedules import SCHEDULES

STEP, WARMUP = 1e-4, 2
CASES = {name: case for name, case in SCHEDULES.items() if " " not in name or name == "cosine_with_restarts three"}
SGD = {"name": "sgd", "lr": 0.2, "momentum": 0.9}


def measured(opened: OpenExperiment, case: str, weights: Tensor) -> Tensor:
    """`[queries]`: the queries' losses after a training in which the examples have these weights."""
    from transformers import get_scheduler

    task: Any = opened.task
    model = task.build_model().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(opened.initial_state.params[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    _, theirs, settings = SCHEDULES[case]
    steps = None if theirs == "inverse_sqrt" else opened.steps
    scheduler = get_scheduler(theirs, optimizer, WARMUP, steps, scheduler_specific_kwargs=settings)
    model.train()
    for step, batch in enumerate(opened.order):
        optimizer.zero_grad()
        torch.manual_seed(shard_seed(0, step, 0, 0))  # of dropout
        losses = task.example_losses(model, task.collate([opened.dataset[index] for index in batch]))
        ((weights[list(batch)] * losses).sum() / len(batch)).backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            scheduler.step()
    model.eval()
    with torch.no_grad():
        return torch.stack([task.example_losses(model, task.collate(q.query.examples)).mean() for q in opened.queries])


def differences(opened: OpenExperiment, case: str, examples: int) -> Tensor:
    """`[examples, queries]` by Richardson's extrapolation of central differences."""

    def slope(example: int, h: float) -> Tensor:
        ends = []
        for sign in (1, -1):
            weights = torch.ones(len(opened.dataset), dtype=torch.float64)
            weights[example] += sign * h
            ends.append(measured(opened, case, weights))
        return (ends[0] - ends[1]) / (2 * h)

    return torch.stack([(4 * slope(i, STEP / 2) - slope(i, STEP)) / 3 for i in range(examples)])


def compare(folder: Path, case: str, **changes: Any) -> Tensor:
    """The scores of the first examples, after the comparison."""
    schedule = {"name": case.partition(" ")[0], "warmup_steps": WARMUP} | SCHEDULES[case][0]
    opened = open_small(folder, training={"optimizer": SGD, "schedule": schedule}, **changes)
    found, expected = run(opened)[:6], differences(opened, case, 6)
    assert float(expected.abs().max()) > 1e-3
    assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())
    return found


@pytest.mark.parametrize("case", CASES)
def test_scores_under_a_schedule_are_central_differences(case: str, tmp_path: Path) -> None:
    compare(tmp_path, case)


def test_scores_with_dropout_are_central_differences_with_the_same_draws(tmp_path: Path) -> None:
    dropping = {"type": "tests.attribution.small_task:SmallTask", "middle": "dropout"}
    with_draws = compare(tmp_path / "dropout", "cosine", task=dropping)
    without = compare(tmp_path / "without", "cosine")
    assert float((with_draws - without).abs().max()) > 1e-2 * float(without.abs().max()), "nothing was dropped"
