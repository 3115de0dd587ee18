"""Scores of other tools beside ours: one correlation per query, over the units that both have. No torch, no store.

Files that people bring, by their suffix:

| file | what it holds |
|---|---|
| .parquet, .csv, .arrow | columns query, unit and score (others are passed over); or `unit` and a column per query id |
| .npz | scores [units, queries], unit_ids, query_ids |

Correlations do not see scale; the slope does, and its sign shows a tool whose scores have the opposite sign.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from magic_pipeline.attribution.rank_correlation import pearson, slope, spearman
from magic_pipeline.attribution.score_matrix import ScoreMatrix
from magic_pipeline.errors import InputError

ForeignScores = dict[str, dict[str, float]]
"""Query id -> unit id -> score."""


@dataclass(frozen=True)
class QueryComparison:
    """One query's row. NaN where a correlation is not defined: fewer than three common units, or one side constant."""

    query: str
    units: int
    spearman: float
    pearson: float
    slope: float


@dataclass(frozen=True)
class Comparison:
    """`only_here`, `only_there`: ids that one side alone has, of queries and of units."""

    queries: tuple[QueryComparison, ...]
    queries_only_here: tuple[str, ...]
    queries_only_there: tuple[str, ...]
    units_only_here: tuple[str, ...]
    units_only_there: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, None for NaN."""
        content = asdict(self)
        for row in content["queries"]:
            row |= {name: None if row[name] != row[name] else row[name] for name in ("spearman", "pearson", "slope")}
        return content

    def lines(self) -> list[str]:
        lines = [f"{'query':<40} {'units':>7} {'Spearman':>9} {'Pearson':>9} {'slope':>10}"]
        for row in self.queries:
            name = row.query if len(row.query) <= 40 else f"{row.query[:37]}..."
            lines.append(f"{name:<40} {row.units:>7} {row.spearman:>9.4f} {row.pearson:>9.4f} {row.slope:>10.4g}")
        for what, where, ids in (
            ("queries", "in the file", self.queries_only_here),
            ("queries", "in the experiment", self.queries_only_there),
            ("units", "in the file", self.units_only_here),
            ("units", "in the experiment", self.units_only_there),
        ):
            if ids:
                lines.append(f"{len(ids)} {what} are not {where}; the first is {ids[0]!r}")
        return lines


def compare(matrix: ScoreMatrix, other: ForeignScores) -> Comparison:
    """Correlations of every query that both have.

    Raises:
        InputError: they have no query in common, or no unit.
    """
    common = [query for query in matrix.query_ids if query in other]
    if not common:
        raise InputError(
            f"it has none of the experiment's queries; the first there is {next(iter(other), None)!r}, "
            f"here {matrix.query_ids[0]!r}",
            field="query",
        )
    there = {unit for query in common for unit in other[query]}
    if not there.intersection(matrix.ids):
        raise InputError(
            f"it has none of the experiment's units; the first there is {next(iter(there), None)!r}, here {matrix.ids[0]!r}",
            field="unit",
        )
    rows = []
    for query in common:
        at = [row for row, unit in enumerate(matrix.ids) if unit in other[query]]
        ours = matrix.scores[at, matrix.query_ids.index(query)].astype(np.float64)
        theirs = np.array([other[query][matrix.ids[row]] for row in at], dtype=np.float64)
        rows.append(
            QueryComparison(
                query, len(at), float(spearman(ours, theirs)), float(pearson(ours, theirs)), slope(ours, theirs)
            )
        )
    return Comparison(
        tuple(rows),
        tuple(query for query in matrix.query_ids if query not in other),
        tuple(query for query in other if query not in matrix.query_ids),
        tuple(unit for unit in matrix.ids if unit not in there),
        tuple(sorted(there.difference(matrix.ids))),
    )


def read_foreign_scores(path: Path) -> ForeignScores:
    """Reads a file of another tool, as the module says.

    Raises:
        InputError: there is no such file, it is laid out otherwise, a score is no number, or a pair is given twice.
    """
    if not path.is_file():
        raise InputError("there is no such file", file=path)
    try:
        if path.suffix == ".npz":
            return _of_arrays(path)
        return _of_columns(path, _columns(path))
    except (pa.ArrowException, OSError, UnicodeDecodeError, zipfile.BadZipFile, ValueError) as error:
        raise InputError(f"cannot be read: {error}", file=path) from error


def _of_arrays(path: Path) -> ForeignScores:
    with path.open("rb") as file, np.load(file) as content:
        missing = [name for name in ("scores", "unit_ids", "query_ids") if name not in content]
        if missing:
            raise InputError(f"has no array {missing[0]!r}; expected scores, unit_ids and query_ids", file=path)
        scores, units, queries = content["scores"], content["unit_ids"].astype(str), content["query_ids"].astype(str)
    if scores.shape != (len(units), len(queries)):
        raise InputError(f"scores should be [{len(units)}, {len(queries)}], found {list(scores.shape)}", file=path)
    return {
        str(query): {str(unit): float(score) for unit, score in zip(units, scores[:, at], strict=True)}
        for at, query in enumerate(queries)
    }


def _columns(path: Path) -> Mapping[str, Sequence[Any]]:
    if path.suffix == ".parquet":
        content = pq.read_table(path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            content = stream.read_all()
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as text:
            header, *rows = csv.reader(text)
        return {name: [row[at] for row in rows if row] for at, name in enumerate(header)}
    else:
        raise InputError("expected a .parquet, .csv, .arrow or .npz file", file=path)
    return {name: content[name].to_pylist() for name in content.column_names}


def _of_columns(path: Path, columns: Mapping[str, Sequence[Any]]) -> ForeignScores:
    if "unit" not in columns:
        raise InputError(f"has no column 'unit'; found {', '.join(columns)}", file=path)
    if "query" in columns:
        if "score" not in columns:
            raise InputError(f"has no column 'score'; found {', '.join(columns)}", file=path)
        pairs = zip(columns["query"], columns["unit"], columns["score"], strict=True)
    else:
        queries = [name for name in columns if name not in ("unit", "index")]
        pairs = (
            (q.removeprefix("score:"), *row) for q in queries for row in zip(columns["unit"], columns[q], strict=True)
        )  # type: ignore[assignment]
    found: ForeignScores = {}
    for query, unit, score in pairs:
        scores = found.setdefault(str(query), {})
        if str(unit) in scores:
            raise InputError(f"gives a score of {unit!r} for the query {query!r} twice", file=path)
        try:
            scores[str(unit)] = float(score)
        except (TypeError, ValueError):
            raise InputError(f"the score of {unit!r} for the query {query!r} is {score!r}", file=path) from None
    return found
