"""The task of these tests: 12 examples of 5 features in 3 classes, and variants of it, each wrong or special in one way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query

Example = tuple[Tensor, int]
EXAMPLES, FEATURES, CLASSES = 12, 5, 3


class SmallTask:
    """Linear-Tanh-Linear in float64.

    Args:
        query_ids: one query each; their contents differ by position.
        data_seed: of the examples.
        middle: what follows the first layer before Tanh: nothing (tanh), dropout or batch_norm.
    """

    def __init__(
        self, query_ids: Sequence[str] = ("first", "second", "third"), data_seed: int = 0, middle: str = "tanh"
    ) -> None:
        self.query_ids, self.middle = query_ids, middle
        generator = torch.Generator().manual_seed(data_seed)
        rows = EXAMPLES + len(query_ids)
        self.features = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
        self.classes = torch.randint(CLASSES, (rows,), generator=generator).tolist()

    def build_model(self) -> nn.Module:
        middle = {"tanh": nn.Identity(), "dropout": nn.Dropout(0.3), "batch_norm": nn.BatchNorm1d(4)}[self.middle]
        return nn.Sequential(nn.Linear(FEATURES, 4), middle, nn.Tanh(), nn.Linear(4, CLASSES))

    def training_data(self) -> InMemoryDataset:
        return InMemoryDataset([self._example(row) for row in range(EXAMPLES)], [f"e{row}" for row in range(EXAMPLES)])

    def queries(self) -> Sequence[Query]:
        return [Query(id_, [self._example(EXAMPLES + row)]) for row, id_ in enumerate(self.query_ids)]

    def collate(self, examples: Sequence[Example], /) -> Any:
        return {"x": torch.stack([x for x, _ in examples]), "y": torch.tensor([y for _, y in examples])}

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    def _example(self, row: int) -> Example:
        return self.features[row], self.classes[row]


class BrokenExample(SmallTask):
    """The loss of the last example is NaN."""

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        broken = (batch["x"] == self.features[EXAMPLES - 1]).all(1)
        return torch.where(broken, float("nan"), super().example_losses(model, batch))


class UnsteadyCollate(SmallTask):
    """Collating the same examples twice gives two batches."""

    calls = itertools.count(1)

    def collate(self, examples: Sequence[Example], /) -> Any:
        batch = super().collate(examples)
        return batch | {"x": batch["x"] + next(self.calls)}


class OneLoss(SmallTask):
    """The losses are reduced."""

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        return super().example_losses(model, batch).mean()


class TooManyLosses(SmallTask):
    """There are two losses per row."""

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        return super().example_losses(model, batch).repeat(2)


class KeptDimension(SmallTask):
    """The losses are reduced, but not to a scalar: they would broadcast."""

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        return super().example_losses(model, batch).mean(0, keepdim=True)


class SinglePrecisionLosses(SmallTask):
    """The losses are cast to float32."""

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        return super().example_losses(model, batch).float()


class VectorMeasurement(SmallTask):
    """A query's measurement is no scalar."""

    def query_measurement(self, model: nn.Module, query: Query) -> Tensor:
        return self.example_losses(model, self.collate(query.examples))


class NotANumberMeasurement(SmallTask):
    """The second query's measurement is NaN from the start."""

    def query_measurement(self, model: nn.Module, query: Query) -> Tensor:
        loss = self.example_losses(model, self.collate(query.examples)).sum()
        return loss * float("nan") if query.id == self.query_ids[1] else loss


class NoGradientAtTheEnd(SmallTask):
    """The first query's measurement has a gradient at the untrained model and none at the trained one: a square root at 0."""

    learnt = 1.2  # between the query's losses before training, 1.32, and after it, 1.03

    def query_measurement(self, model: nn.Module, query: Query) -> Tensor:
        loss = self.example_losses(model, self.collate(query.examples)).sum()
        left = (loss - self.learnt) * (loss > self.learnt)
        return left.sqrt() if query.id == self.query_ids[0] else loss


class OverflowingQuery(SmallTask):
    """The first query is so large that its cotangent overflows on the way back."""

    def query_measurement(self, model: nn.Module, query: Query) -> Tensor:
        loss = self.example_losses(model, self.collate(query.examples)).sum()
        return loss * 1e308 if query.id == self.query_ids[0] else loss


class NoQueries(SmallTask):
    """Nothing is asked."""

    def queries(self) -> Sequence[Query]:
        return []


class EmptyQuery(SmallTask):
    """A query holds no example."""

    def queries(self) -> Sequence[Query]:
        return [Query("hollow", [])]


class ThreeLayers(SmallTask):
    """With a dropout of 0, so that the parameters' names are known: 0 and 3."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.0), nn.Tanh(), nn.Linear(4, CLASSES))
