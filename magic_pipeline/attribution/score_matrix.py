"""The scores of many queries as one matrix, and as one file. Local files only; no torch, no store.

Every format keeps query and unit ids exactly and says where the scores come from:

| format | layout | provenance |
|---|---|---|
| wide Parquet | a row per unit, a column `score:<query id>` per query | key-value metadata |
| long Parquet | a row per query and unit: query, unit, index, score; a row group per query | key-value metadata |
| CSV | as long Parquet; numbers with the digits that give the same bits back | `<file>.json` beside it |
| NPZ | scores [units, queries], unit_ids, query_ids | `meta`, a JSON text |
| Arrow | as long Parquet, in Arrow's streaming format: `datasets.Dataset.from_file` reads it | key-value metadata |

`score_matrix_files.py` reads all of them back.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from magic_pipeline.attribution.score_table import (
    SCHEMA_VERSION,
    SIGN_CONVENTION,
    ScoreFacts,
    Scores,
    ScoreTable,
    file_metadata,
    read_described,
)
from magic_pipeline.errors import DamagedObjectError, InputError, StorageError

MatrixFormat = Literal["parquet", "parquet_wide", "csv", "npz", "arrow"]
_LONG_COLUMNS = ("query", "unit", "index", "score")
_COLUMN = "score:"


@dataclass(frozen=True)
class ScoreMatrix:
    """`scores[i, q]` is the score of the unit `ids[i]` for the query of `facts[q]`; all of one training trajectory."""

    facts: tuple[ScoreFacts, ...]
    ids: tuple[str, ...]
    scores: Scores

    @property
    def query_ids(self) -> tuple[str, ...]:
        return tuple(facts.query_id for facts in self.facts)

    def column(self, query: int) -> Scores:
        """`[units]`, the scores for one query."""
        return np.ascontiguousarray(self.scores[:, query])

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the scores come from and what their sign means, as plain data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "sign_convention": SIGN_CONVENTION,
            "dtype": str(self.scores.dtype),
            "queries": [asdict(facts) for facts in self.facts],
        }

    def to_pandas(self) -> Any:
        """A DataFrame with a row per unit id and a column per query id; `attrs` is the provenance.

        Raises:
            InputError: pandas is not installed.
        """
        pandas = _import("pandas")
        frame = pandas.DataFrame(
            self.scores,
            index=pandas.Index(self.ids, name="unit", dtype=object),
            columns=pandas.Index(self.query_ids, name="query", dtype=object),
        )
        frame.attrs = self.provenance
        return frame

    def to_xarray(self) -> Any:
        """A DataArray with the dimensions `unit` and `query`; `attrs` is the provenance.

        Raises:
            InputError: xarray is not installed.
        """
        coordinates = {
            name: np.array(ids, dtype=object) for name, ids in (("unit", self.ids), ("query", self.query_ids))
        }
        return _import("xarray").DataArray(
            self.scores, coords=coordinates, dims=("unit", "query"), name="score", attrs=self.provenance
        )

    def table(self, query: int) -> ScoreTable:
        """The score table that the column was made from."""
        return ScoreTable(self.facts[query], self.ids, self.column(query))


def combine(tables: Sequence[ScoreTable]) -> ScoreMatrix:
    """The tables side by side, in the order given.

    Raises:
        InputError: there is none, a query is given twice, or they are not of one experiment, training, dtype and units.
    """
    if not tables:
        raise InputError("there are no finished queries to put together")
    first, ids = tables[0], set[str]()
    for table in tables:
        for name in ("experiment", "fingerprint", "trajectory_digest", "unit"):
            _must_agree(name, getattr(first.facts, name), getattr(table.facts, name), table)
        _must_agree("dtype", first.scores.dtype, table.scores.dtype, table)
        if table.ids != first.ids:
            raise InputError("its units are not those of the first query", field=f"query {table.facts.query_id!r}")
        if table.facts.query_id in ids:
            raise InputError("is given twice", field=f"query {table.facts.query_id!r}")
        ids.add(table.facts.query_id)
    return ScoreMatrix(
        tuple(table.facts for table in tables), first.ids, np.stack([table.scores for table in tables], axis=1)
    )


def write_score_matrix_file(matrix: ScoreMatrix, path: Path, format: MatrixFormat) -> int:  # noqa: A002
    """Writes `path`, whole or not at all, and returns the number of its rows.

    Raises:
        InputError: the folder is not there, or ids that the format cannot hold.
        StorageError: the file cannot be written.
    """
    writers: dict[str, Callable[[ScoreMatrix, Path], int]] = {
        "parquet": _write_long, "parquet_wide": _write_wide, "csv": _write_csv, "npz": _write_npz, "arrow": _write_arrow,
    }  # fmt: skip
    if format not in writers:
        raise InputError(f"should be one of {', '.join(writers)}, found {format!r}", field="format")
    if not path.parent.is_dir() or path.is_dir():
        raise InputError("should be a file in a folder that exists", file=path, field="output")
    if format == "csv":
        # First, so that the scores are never there without it.
        _replace(Path(f"{path}.json"), lambda target: _write_text(target, matrix.provenance))
    return _replace(path, lambda target: writers[format](matrix, target))


def read_score_matrix_file(path: Path) -> ScoreMatrix:
    """Reads a wide Parquet file. Raises as `read_score_table`."""
    content, text = read_described(path, "score_matrix")
    try:
        facts = tuple(ScoreFacts(**entry) for entry in json.loads(text["queries"]))
        names = [f"{_COLUMN}{entry.query_id}" for entry in facts]
        if content.column_names != ["unit", "index", *names]:
            raise DamagedObjectError(f"{path}: its columns are not those of its {len(facts)} queries")
        ids = tuple(content["unit"].to_pylist())
        return combine([ScoreTable(f, ids, content[name].to_numpy()) for f, name in zip(facts, names, strict=True)])
    except (InputError, KeyError, TypeError, ValueError) as error:
        raise DamagedObjectError(f"{path}: {error}") from error


def _must_agree(name: str, expected: object, found: object, table: ScoreTable) -> None:
    if expected != found:
        message = f"its {name} is {found}, that of the queries before it is {expected}: they cannot be put together"
        raise InputError(message, field=f"query {table.facts.query_id!r}")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f"this needs {name}, which is not installed; python -m pip install {name}") from None


def _metadata(matrix: ScoreMatrix, kind: str) -> dict[str, str]:
    queries = json.dumps([asdict(facts) for facts in matrix.facts])
    return file_metadata(kind, {"dtype": str(matrix.scores.dtype), "queries": queries})


def _write_wide(matrix: ScoreMatrix, path: Path) -> int:
    names = ["unit", "index", *(f"{_COLUMN}{query_id}" for query_id in matrix.query_ids)]
    columns = [
        pa.array(matrix.ids, pa.string()),
        pa.array(range(len(matrix.ids)), pa.int64()),
        *(pa.array(matrix.column(query)) for query in range(len(matrix.facts))),
    ]
    table = pa.Table.from_arrays(columns, names=names).replace_schema_metadata(_metadata(matrix, "score_matrix"))
    pq.write_table(table, path, compression="zstd")
    return len(matrix.ids)


def _write_long(matrix: ScoreMatrix, path: Path) -> int:
    with pq.ParquetWriter(path, _long_schema(matrix), compression="zstd") as writer:
        for piece in _long_pieces(matrix):
            writer.write_table(piece)
    return matrix.scores.size


def _write_arrow(matrix: ScoreMatrix, path: Path) -> int:
    with pa.ipc.new_stream(path, _long_schema(matrix)) as writer:
        for piece in _long_pieces(matrix):
            writer.write_table(piece)
    return matrix.scores.size


def _long_schema(matrix: ScoreMatrix) -> pa.Schema:
    types = (pa.string(), pa.string(), pa.int64(), pa.from_numpy_dtype(matrix.scores.dtype))
    return pa.schema(list(zip(_LONG_COLUMNS, types, strict=True)), metadata=_metadata(matrix, "score_list"))


def _long_pieces(matrix: ScoreMatrix) -> Iterator[pa.Table]:
    units, index = pa.array(matrix.ids, pa.string()), pa.array(range(len(matrix.ids)), pa.int64())
    for query, query_id in enumerate(matrix.query_ids):
        ids = pa.repeat(pa.scalar(query_id, pa.string()), len(matrix.ids))
        columns = [ids, units, index, pa.array(matrix.column(query))]
        yield pa.Table.from_arrays(columns, schema=_long_schema(matrix))


def _write_csv(matrix: ScoreMatrix, path: Path) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_LONG_COLUMNS)
        for query, query_id in enumerate(matrix.query_ids):
            rows = zip(matrix.ids, matrix.column(query), strict=True)
            # str of a numpy number is the shortest text that reads back to the same bits in its dtype.
            writer.writerows((query_id, unit, index, str(score)) for index, (unit, score) in enumerate(rows))
    return matrix.scores.size


def _write_npz(matrix: ScoreMatrix, path: Path) -> int:
    query_ids, unit_ids = np.array(matrix.query_ids, dtype=np.str_), np.array(matrix.ids, dtype=np.str_)
    if tuple(query_ids.tolist()) != matrix.query_ids or tuple(unit_ids.tolist()) != matrix.ids:
        raise InputError("an id ends in a NUL character, which NPZ cannot hold; export parquet", field="format")
    meta = np.array(json.dumps(matrix.provenance))
    with path.open("wb") as file:
        np.savez_compressed(file, scores=matrix.scores, meta=meta, query_ids=query_ids, unit_ids=unit_ids)
    return len(matrix.ids)


def _write_text(path: Path, content: dict[str, Any]) -> int:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1


def _replace(path: Path, write: Callable[[Path], int]) -> int:
    """Writes beside `path` first, so that a reader never sees half a file and a failure leaves the old one."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
            target = Path(folder) / "file"
            rows = write(target)
            os.replace(target, path)
            return rows
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
