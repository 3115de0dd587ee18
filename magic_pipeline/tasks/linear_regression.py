"""`linear_regression`: the task whose scores have a closed form, for checking everything else.

Under plain SGD with learning rates eta_t and batches of B_t rows, the step is theta[t+1] = A_t theta[t] + b_t with
A_t = I - (eta_t / B_t) sum_{i in batch t} x_i x_i^T, so that

    score[i, q] = - sum_{t: i in batch t} (eta_t / B_t) (x_i . theta[t] - y_i) x_i^T lambda[t+1]
    lambda[t+1] = A_{t+1}^T ... A_{N-1}^T grad phi_q(theta[N])
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query
from magic_pipeline.tasks.query_source import QuerySource
from magic_pipeline.tasks.settings import check_count


@dataclass(frozen=True)
class Point:
    """Features x [features] float64 and the target y."""

    x: Tensor
    y: float


class LinearRegression:
    """The model w . x without bias under half the squared error; queries are held-out points.

    Args:
        examples, features: the size of the drawn data (x standard normal, y = x . w + noise of 0.1).
        query_count: how many held-out points are drawn.
        data_seed: of the draw.
        data: a .npz file beside the experiment file to take instead: x [n, d], y [n], query_x [q, d], query_y [q].
        queries: the split `test`; default all of it.
    """

    def __init__(
        self,
        examples: int = 32,
        features: int = 4,
        query_count: int = 3,
        data_seed: int = 0,
        data: str | None = None,
        folder: Path | None = None,
        queries: QuerySource | None = None,
    ) -> None:
        if data is None:
            sizes = (check_count("examples", examples), check_count("query_count", query_count))
            seed = check_count("data_seed", data_seed, at_least=0)
            self._train, self._test = _drawn(*sizes, check_count("features", features), seed)
        else:
            self._train, self._test = _read((folder or Path()) / data)
        if queries is not None and queries.file is not None:
            raise InputError(
                "linear_regression takes queries from its split test, not from a file", field="queries.file"
            )
        if queries is not None:
            queries.check_split("test")
        self.query_count = None if queries is None else queries.count
        if (self.query_count or 1) > len(self._test):
            raise InputError(
                f"the split test has {len(self._test)} points, not {self.query_count}", field="queries.count"
            )

    def build_model(self) -> nn.Module:
        """One linear layer without bias."""
        return nn.Linear(len(self._train[0].x), 1, bias=False)

    def training_data(self) -> InMemoryDataset:
        """The points, with ids `point-0`, `point-1`, ..."""
        return InMemoryDataset(self._train, (f"point-{index}" for index in range(len(self._train))))

    def queries(self) -> Sequence[Query]:
        """Held-out points `query-0`, `query-1`, ..."""
        return [Query(f"query-{index}", [point]) for index, point in enumerate(self._test[: self.query_count])]

    def collate(self, examples: Sequence[Point], /) -> dict[str, Tensor]:
        """x [rows, features] and y [rows], float64."""
        y = torch.tensor([point.y for point in examples], dtype=torch.float64)
        return {"x": torch.stack([point.x for point in examples]), "y": y}

    def example_losses(self, model: nn.Module, batch: dict[str, Tensor], /) -> Tensor:
        """Half the squared error [rows], in the model's dtype."""
        dtype = next(model.parameters()).dtype
        predicted: Tensor = model(batch["x"].to(dtype)).squeeze(1)
        return 0.5 * (predicted - batch["y"].to(dtype)) ** 2

    def render(self, example: Point) -> str:
        """The point's numbers."""
        x = ", ".join(f"{value:.3g}" for value in example.x.tolist())
        return f"x = ({x}), y = {example.y:.3g}"


def _drawn(examples: int, queries: int, features: int, seed: int) -> tuple[list[Point], list[Point]]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(features, generator=generator, dtype=torch.float64)

    def draw(count: int) -> list[Point]:
        x = torch.randn(count, features, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, generator=generator, dtype=torch.float64)
        return _points(x.numpy(), (x @ weights + 0.1 * noise).numpy())

    return draw(examples), draw(queries)


def _read(file: Path) -> tuple[list[Point], list[Point]]:
    try:
        with np.load(file, allow_pickle=False) as content:
            x, y, query_x, query_y = (content[name] for name in ("x", "y", "query_x", "query_y"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        message = f"expected an .npz file with x, y, query_x and query_y ({error})"
        raise InputError(message, file=file, field="task.data") from error
    fits = x.ndim == 2 and x.shape[0] > 0 and y.shape == x.shape[:1]
    queries_fit = query_x.ndim == 2 and query_x.shape[1:] == x.shape[1:] and query_y.shape == query_x.shape[:1]
    if not fits or not queries_fit or len(query_x) == 0:
        shapes = f"x {x.shape}, y {y.shape}, query_x {query_x.shape}, query_y {query_y.shape}"
        raise InputError(f"expected [n, d], [n], [q, d], [q], found {shapes}", file=file, field="task.data")
    return _points(x, y), _points(query_x, query_y)


def _points(x: np.ndarray, y: np.ndarray) -> list[Point]:
    rows = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64))
    return [Point(row, float(target)) for row, target in zip(rows, y, strict=True)]
