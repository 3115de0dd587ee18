"""Reads exported scores back: every format, every bit, the ids and the provenance. Local files only; no torch, no store."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from magic_pipeline.attribution.score_matrix import ScoreMatrix, combine, read_score_matrix_file
from magic_pipeline.attribution.score_table import PREFIX, SCHEMA_VERSION, ScoreFacts, ScoreTable
from magic_pipeline.errors import DamagedObjectError, InputError

_COLUMNS = ["query", "unit", "index", "score"]


def read_exported_scores(path: Path) -> ScoreMatrix:
    """The matrix that `write_score_matrix_file` wrote, in whatever format the file's name says.

    Raises:
        InputError: there is no such file, its suffix is none of the formats', or a newer version wrote it.
        DamagedObjectError: it is no such file, or its rows are not what it says of itself.
    """
    readers: dict[str, Callable[[Path], ScoreMatrix]] = {
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
        ".csv": _read_csv,
        ".npz": _read_npz,
    }
    if path.suffix not in readers:
        raise InputError(f"expected a file of exported scores ({', '.join(readers)})", file=path)
    if not path.is_file():
        raise InputError("there is no such file", file=path)
    try:
        return readers[path.suffix](path)
    except (KeyError, TypeError, ValueError, pa.ArrowException, zipfile.BadZipFile, OSError) as error:
        raise DamagedObjectError(f"{path}: cannot be read as exported scores: {error}") from error


def _read_parquet(path: Path) -> ScoreMatrix:
    metadata = pq.read_schema(path).metadata or {}
    if metadata.get(f"{PREFIX}kind".encode()) == b"score_matrix":
        return read_score_matrix_file(path)
    return _of_long(path, pq.read_table(path))


def _read_arrow(path: Path) -> ScoreMatrix:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return _of_long(path, stream.read_all())


def _of_long(path: Path, content: pa.Table) -> ScoreMatrix:
    metadata = {key.decode(): value.decode() for key, value in (content.schema.metadata or {}).items()}
    if metadata.get(f"{PREFIX}kind") != "score_list" or content.column_names != _COLUMNS:
        raise DamagedObjectError(f"{path}: should hold a score_list of magic_pipeline, found {content.column_names}")
    facts = _facts(path, json.loads(metadata[f"{PREFIX}queries"]), metadata[f"{PREFIX}schema_version"])
    queries, units = content["query"].to_pylist(), content["unit"].to_pylist()
    return _of_columns(path, facts, queries, units, content["score"].to_numpy())


def _read_csv(path: Path) -> ScoreMatrix:
    beside = Path(f"{path}.json")
    if not beside.is_file():
        raise InputError(
            f"where its scores come from is told in {beside.name} beside it, which is not there", file=path
        )
    about = json.loads(beside.read_text(encoding="utf-8"))
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    if header != _COLUMNS:
        raise DamagedObjectError(f"{path}: expected the columns {', '.join(_COLUMNS)}, found {', '.join(header)}")
    scores = np.array([row[3] for row in rows]).astype(about["dtype"])
    facts = _facts(path, about["queries"], about["schema_version"])
    return _of_columns(path, facts, [row[0] for row in rows], [row[1] for row in rows], scores)


def _read_npz(path: Path) -> ScoreMatrix:
    with path.open("rb") as file, np.load(file) as content:
        about = json.loads(str(content["meta"]))
        units, queries, scores = content["unit_ids"].tolist(), content["query_ids"].tolist(), content["scores"]
    facts = _facts(path, about["queries"], about["schema_version"])
    if [one.query_id for one in facts] != queries or scores.shape != (len(units), len(queries)):
        raise DamagedObjectError(f"{path}: its arrays are not those of its {len(facts)} queries")
    return combine([ScoreTable(one, tuple(units), scores[:, at].copy()) for at, one in enumerate(facts)])


def _facts(path: Path, queries: Sequence[Mapping[str, Any]], version: object) -> list[ScoreFacts]:
    if str(version) != str(SCHEMA_VERSION):
        raise InputError(f"has schema version {version}; this magic_pipeline reads {SCHEMA_VERSION}", file=path)
    return [ScoreFacts(**entry) for entry in queries]


def _of_columns(
    path: Path, facts: Sequence[ScoreFacts], queries: Sequence[str], units: Sequence[str], scores: Any
) -> ScoreMatrix:
    """The long form back in columns: each query's rows follow each other, in the order of its metadata."""
    rows, left = divmod(len(scores), len(facts))
    names = [one.query_id for one in facts for _ in range(rows)]
    if left or list(queries) != names:
        raise DamagedObjectError(f"{path}: its {len(scores)} rows are not those of its {len(facts)} queries")
    pieces = [slice(at * rows, (at + 1) * rows) for at in range(len(facts))]
    return combine(
        [ScoreTable(one, tuple(units[at]), scores[at].copy()) for one, at in zip(facts, pieces, strict=True)]
    )
