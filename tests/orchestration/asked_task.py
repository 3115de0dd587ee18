"""Linear regression whose queries are lines of a file: `{"id": ..., "x": [...], "y": ...}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magic_pipeline.tasks.linear_regression import LinearRegression, Point
from magic_pipeline.tasks.protocol import Query
from magic_pipeline.tasks.query_source import QuerySource, read_query_lines


class Asked(LinearRegression):
    """Every line of the file is a query of one example."""

    def __init__(self, queries: QuerySource, **settings: Any) -> None:
        super().__init__(queries=None, **settings)
        assert queries.file is not None
        self.lines = read_query_lines(queries.file)

    def queries(self) -> Sequence[Query]:
        points = (Point(torch.tensor(one.fields["x"], dtype=torch.float64), one.fields["y"]) for one in self.lines)
        return [Query(line.id, [point]) for line, point in zip(self.lines, points, strict=True)]
