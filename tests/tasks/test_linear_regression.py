"""Scores of linear regression under SGD: the closed form, unrolled autograd and the walk agree."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.optimizers import SGD
from magic_pipeline.metagradient.state import Cotangent
from magic_pipeline.metagradient.step import Recipe, Shard, train_step
from magic_pipeline.metagradient.walk import Lanes, walk_segment
from magic_pipeline.tasks.linear_regression import LinearRegression
from magic_pipeline.tasks.protocol import Query, QuerySource, denominator, query_measurement

# Twelve points in batches of 5, 4 and 3, twice over in another order: ragged, and every point is met twice.
BATCHES = [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11], [11, 3, 7, 0, 9], [2, 10, 6, 4], [1, 5, 8]]
RATES = [0.3, 0.25, 0.2, 0.2, 0.1, 0.05]


@pytest.fixture(scope="module")
def task() -> LinearRegression:
    return LinearRegression(examples=12, features=3, query_count=2)


@pytest.fixture(scope="module")
def start(task: LinearRegression) -> Tensor:
    torch.manual_seed(0)
    return task.build_model().double().get_parameter("weight").detach().squeeze(0)


@pytest.fixture(scope="module")
def points(task: LinearRegression) -> tuple[Tensor, Tensor]:
    batch = task.collate(list(task.training_data()))
    return batch["x"], batch["y"]


@pytest.fixture(scope="module")
def closed_form(task: LinearRegression, start: Tensor, points: tuple[Tensor, Tensor]) -> Tensor:
    """scores [examples, queries] by the formula in the task's docstring, in matrices."""
    x, y = points
    states, maps = [start], []
    for batch, rate in zip(BATCHES, RATES, strict=True):
        rows, scale = x[batch], rate / len(batch)
        maps.append(torch.eye(3, dtype=torch.float64) - scale * rows.T @ rows)
        states.append(maps[-1] @ states[-1] + scale * rows.T @ y[batch])
    scores = torch.zeros(len(x), 2, dtype=torch.float64)
    for column, query in enumerate(task.queries()):
        point = query.examples[0]
        cotangent = (point.x @ states[-1] - point.y) * point.x
        for step in reversed(range(len(BATCHES))):
            batch = BATCHES[step]
            residuals = x[batch] @ states[step] - y[batch]
            scores[batch, column] -= RATES[step] / len(batch) * residuals * (x[batch] @ cotangent)
            cotangent = maps[step].T @ cotangent
    return scores


def test_the_closed_form_is_what_unrolled_autograd_gives(
    task: LinearRegression, start: Tensor, points: tuple[Tensor, Tensor], closed_form: Tensor
) -> None:
    x, y = points
    weights = torch.ones(len(x), dtype=torch.float64, requires_grad=True)
    theta = start.clone().requires_grad_()
    for batch, rate in zip(BATCHES, RATES, strict=True):
        loss = (weights[batch] * 0.5 * (x[batch] @ theta - y[batch]) ** 2).sum() / len(batch)
        theta = theta - rate * torch.autograd.grad(loss, theta, create_graph=True)[0]
    for column, query in enumerate(task.queries()):
        phi = 0.5 * (query.examples[0].x @ theta - query.examples[0].y) ** 2
        (unrolled,) = torch.autograd.grad(phi, weights, retain_graph=True)
        assert torch.allclose(unrolled, closed_form[:, column], rtol=1e-12, atol=1e-15)


def test_the_walk_gives_the_closed_form(task: LinearRegression, start: Tensor, closed_form: Tensor) -> None:
    module = task.build_model().double()
    with torch.no_grad():
        module.get_parameter("weight").copy_(start)
    model = FunctionalModel(module, example_losses=task.example_losses, dtype=torch.float64)
    recipe = Recipe(model, SGD(), RATES)

    def data(step: int) -> tuple[Shard, ...]:
        batch = task.collate([task.training_data()[index] for index in BATCHES[step]])
        return (Shard(batch, torch.tensor(BATCHES[step]), denominator(task, batch), seed=0),)

    first = state = model.initial_state(SGD(), data(0)[0].batch)
    for step in range(len(BATCHES)):
        state, _ = train_step(recipe, state, data(step))

    def measured(query: Query, module: nn.Module) -> Tensor:
        return query_measurement(task, module, query)

    lanes = Lanes.empty(state, lanes=2, units=12)
    for lane, query in enumerate(task.queries()):
        weight = state.params["weight"].clone().requires_grad_()
        phi = model.measurement({"weight": weight}, {}, partial(measured, query))
        zeros = Cotangent.zeros(state, 2).lane(lane)
        lanes.join(
            lane, {**zeros, "params/weight": torch.autograd.grad(phi, weight)[0]}, torch.zeros(12, dtype=torch.float64)
        )
    for _ in walk_segment(recipe, data, first, len(BATCHES), lanes, chunk=2):
        pass
    assert torch.allclose(lanes.scores.T, closed_form, rtol=1e-12, atol=1e-15)


def test_more_queries_leave_the_training_data_alone() -> None:
    few, more = (LinearRegression(query_count=count).training_data().digest for count in (1, 5))
    assert few == more
    assert LinearRegression(data_seed=1).training_data().digest != few


def test_data_come_from_a_file(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "x": np.eye(2),
        "y": np.array([1.0, 2.0]),
        "query_x": np.ones((3, 2)),
        "query_y": np.zeros(3),
    }
    np.savez(tmp_path / "points.npz", **arrays)
    task = LinearRegression(data="points.npz", folder=tmp_path, queries=QuerySource(split="test", count=2))
    assert [query.id for query in task.queries()] == ["query-0", "query-1"]
    assert task.collate(list(task.training_data()))["x"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert task.render(task.training_data()[1]) == "x = (0, 1), y = 2"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.eye(2)}, "expected an .npz file with x, y, query_x and query_y"),
        ({"x": np.eye(2), "y": np.ones(3), "query_x": np.eye(2), "query_y": np.ones(2)}, r"found x \(2, 2\), y \(3,\)"),
        ({"x": np.eye(2), "y": np.ones(2), "query_x": np.eye(3), "query_y": np.ones(3)}, r"query_x \(3, 3\)"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, arrays: dict[str, Any] | None, message: str) -> None:
    if arrays is not None:
        np.savez(tmp_path / "points.npz", **arrays)
    with pytest.raises(InputError, match=rf"points\.npz: task\.data: .*{message}"):
        LinearRegression(data="points.npz", folder=tmp_path)
