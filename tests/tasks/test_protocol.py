"""What a task may leave out, and what a query may not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.tasks import protocol
from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query


class Scale:
    """The smallest task: an example is a number x, the model a factor, the loss factor * x."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def training_data(self) -> InMemoryDataset:
        return InMemoryDataset([1.0, 2.0], ["one", "two"])

    def queries(self) -> list[Query]:
        return [Query("contrast", [3.0, 5.0], [1.0, -1.0])]

    def collate(self, examples: Sequence[float], /) -> dict[str, Tensor]:
        return {"x": torch.tensor(examples).unsqueeze(1)}

    def example_losses(self, model: nn.Module, batch: dict[str, Tensor], /) -> Tensor:
        losses: Tensor = model(batch["x"])
        return losses.squeeze(1)


class TokenScale(Scale):
    """Losses by token: each example's loss in two halves."""

    def example_losses(self, model: nn.Module, batch: dict[str, Tensor], /) -> Tensor:
        losses: Tensor = model(batch["x"]) / 2
        return losses.expand(-1, 2)


class Own(Scale):
    """Defines all that has a default."""

    def denominator(self, batch: dict[str, Tensor]) -> float:
        return 7.0

    def measurement(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return 10 * self.example_losses(model, batch)

    def units(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor([[4]])

    def render(self, example: float) -> str:
        return f"the number {example}"


class OwnQuery(Scale):
    def query_measurement(self, model: nn.Module, query: Query) -> Tensor:
        return torch.tensor(42.0)


@pytest.fixture
def twice() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    return model


def test_a_task_of_the_five_methods_gets_every_default(twice: nn.Module) -> None:
    task = Scale()
    batch = task.collate([1.0, 2.0, 4.0])
    assert protocol.denominator(task, batch) == 3.0
    assert protocol.measurement(task, twice, batch).tolist() == [2.0, 4.0, 8.0]
    assert protocol.query_measurement(task, twice, task.queries()[0]).item() == 2 * 3 - 2 * 5
    assert protocol.units(task, batch) is None
    assert protocol.render(task, 1.5) == "1.5"


def test_a_tasks_own_methods_take_the_place_of_the_defaults(twice: nn.Module) -> None:
    task = Own()
    batch = task.collate([1.0])
    assert protocol.denominator(task, batch) == 7.0
    assert protocol.measurement(task, twice, batch).tolist() == [20.0]
    assert protocol.query_measurement(task, twice, Query("q", [1.0, 2.0])).item() == 30.0
    units = protocol.units(task, batch)
    assert units is not None and units.tolist() == [[4]]
    assert protocol.render(task, 1.5) == "the number 1.5"
    assert protocol.query_measurement(OwnQuery(), twice, Query("q", [1.0])).item() == 42.0


def test_losses_by_token_are_measured_as_their_sum(twice: nn.Module) -> None:
    assert protocol.measurement(TokenScale(), twice, TokenScale().collate([1.0, 3.0])).tolist() == [2.0, 6.0]


def test_a_query_of_float32_data_is_measured_in_the_models_dtype(twice: nn.Module) -> None:
    value = protocol.query_measurement(Scale(), twice.double(), Query("q", [0.1]))
    assert value.dtype == torch.float64


def test_placing_a_batch_keeps_its_structure_and_its_integers() -> None:
    batch = {"x": torch.zeros(2), "more": [torch.zeros(2, dtype=torch.int64), "text"]}
    placed = protocol.place_like(nn.Linear(1, 1).double(), batch)
    assert placed["x"].dtype == torch.float64
    assert placed["more"][0].dtype == torch.int64
    assert placed["more"][1] == "text"


@pytest.mark.parametrize(
    ("batch", "found"),
    [({"x": torch.zeros(2), "y": torch.zeros(3)}, r"leading dimensions \[2, 3\]"), ({"x": 1}, "no tensor")],
)
def test_a_batch_whose_rows_cannot_be_told_asks_for_a_denominator(batch: object, found: str) -> None:
    with pytest.raises(InputError, match=found + r".*define denominator\(batch\)"):
        protocol.denominator(Scale(), batch)


def test_a_denominator_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match=r"denominator\(batch\) gave 0.0"):
        protocol.denominator(Scale(), {"x": torch.zeros(0, 1)})


def test_a_querys_coefficients_default_to_the_mean() -> None:
    assert Query("q", ["a", "b", "c", "d"]).coefficients == (0.25,) * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a|b", []), "query 'a|b': expected at least one example, found none"),
        (("q", ["x"], [1.0, 2.0]), "query 'q': expected 1 coefficients, one per example, found 2"),
        (("q", ["x"], [float("nan")]), "query 'q': expected finite coefficients, found nan"),
        (("q", ["x"], [float("inf")]), "query 'q': expected finite coefficients, found inf"),
        (("q", ["x"], ["1"]), "query 'q': expected finite coefficients, found '1'"),
        (("q", ["x"], [True]), "query 'q': expected finite coefficients, found True"),
        (("", ["x"]), "queries: expected a query's id to be a non-empty string, found ''"),
        ((7, ["x"]), "queries: expected a query's id to be a non-empty string, found 7"),
    ],
)
def test_a_wrong_query_is_refused_by_name(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError) as raised:
        Query(*arguments)
    assert str(raised.value) == message
