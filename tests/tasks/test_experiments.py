"""The shipped experiment files open, and the task of one's own in them learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from magic_pipeline.attribution.experiment import load_experiment, load_experiments
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.metagradient.step import train_step

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize(
    ("name", "examples", "queries", "steps"),
    [
        ("digits", 1500, 12, 60),
        ("digits_conv", 1500, 10, 60),
        ("stdlib_lm", 640, 6, 40),
        ("own_model", 150, 6, 60),
        ("encoder", 162, 6, 72),
        ("pictures", 1500, 6, 45),
        ("regression", 400, 4, 80),
    ],
)
def test_a_shipped_experiment_opens(name: str, examples: int, queries: int, steps: int) -> None:
    opened = open_experiment(load_experiment(FOLDER / f"{name}.yaml"))
    assert (len(opened.units), len(opened.queries), opened.steps) == (examples, queries, steps)


def test_every_shipped_experiment_file_is_right() -> None:
    found = load_experiments(FOLDER)
    assert [path.stem for path, experiment in found.items() if isinstance(experiment, Exception)] == []
    assert {path.stem for path in found} >= {"digits", "stdlib_lm", "own_model", "pictures"}


@pytest.mark.parametrize(
    ("name", "factor", "typical"),
    [("own_model", 0.2, 0.3), ("encoder", 0.8, 1.1), ("pictures", 0.2, 0.1), ("regression", 0.7, 1.0)],
)
def test_the_task_of_ones_own_learns(name: str, factor: float, typical: float) -> None:
    opened = open_experiment(load_experiment(FOLDER / f"{name}.yaml"))
    state, losses = opened.initial_state, []
    for step in range(opened.steps):
        state, record = train_step(opened.recipe, state, opened.data(step))
        losses.append(record.loss)
    assert sum(losses[-6:]) < factor * sum(losses[:6])
    measured = [opened.phi(query, state.params, state.buffers).item() for query in opened.queries]
    assert sorted(measured)[len(measured) // 2] < typical
