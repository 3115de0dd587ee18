"""One query's scores as one Parquet file that says what it is. Local files only; no torch, no store.

Columns: `unit` (the example's id), `index` (its score row, 0 .. n-1) and `score` in the run's dtype. Scores of tokens add the lists
`token_score`, `token_id` and `token_label`, one entry per token of the example (token_columns.py). The key-value metadata, under
`magic_pipeline.*`, is a `ScoreFacts` and the sign convention in words: it needs nothing beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from magic_pipeline.attribution.token_columns import (
    TokenScores,
    TokensOfUnit,
    read_tokens,
    token_columns,
    token_fields,
    token_types,
)
from magic_pipeline.errors import DamagedObjectError, InputError, NonFiniteError

SCHEMA_VERSION = 1
SIGN_CONVENTION = (
    "score = d(query measurement) / d(weight of the unit in training); with the default measurement, the query's loss, "
    "a negative score means that more weight on the unit lowers the loss: the unit helps. "
    "Predicted change of the measurement when a set of units is left out: minus the sum of their scores."
)
PREFIX = "magic_pipeline."

Scores = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class ScoreFacts:
    """Where a column of scores comes from.

    Attributes:
        query_id: the user's own id, exactly.
        query_digest: of the query's content; fingerprint: of the training run; trajectory_digest: of its states;
            walk_digest: of the finished walk that the scores were made by.
        unit: what a row is, such as example.
        versions: of the libraries that computed the scores.
    """

    experiment: str
    query_id: str
    query_key: str
    query_digest: str
    fingerprint: str
    trajectory_digest: str
    walk_digest: str
    unit: str
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", dict(self.versions))


@dataclass(frozen=True)
class ScoreTable:
    """The scores of one query: `scores[i]` (float32 or float64) belongs to the unit `ids[i]`.

    Attributes:
        tokens: with `unit: token`, the scores of each unit's tokens; `scores[i]` is their sum.

    Raises:
        InputError: an id is given twice, is no text, or the lengths differ.
        NonFiniteError: a score is NaN or infinite.
    """

    facts: ScoreFacts
    ids: tuple[str, ...]
    scores: Scores
    tokens: TokenScores | None = None

    def tokens_of(self, unit: str) -> TokensOfUnit:
        """The tokens of one example with their scores.

        Raises:
            InputError: there is no such unit, or the scores are not of tokens.
        """
        if self.tokens is None:
            raise InputError(f"the scores are of {self.facts.unit}s, not of tokens", field="attribution.unit")
        if unit not in self.ids:
            raise InputError(f"there is no unit {unit!r}", field=f"query {self.facts.query_id!r}")
        return self.tokens.of(self.ids.index(unit))

    def __post_init__(self) -> None:
        query = f"query {self.facts.query_id!r}"
        if self.scores.ndim != 1 or self.scores.dtype not in (np.float32, np.float64):
            found = f"{self.scores.dtype} {list(self.scores.shape)}"
            raise InputError(f"scores should be float32 or float64 [{len(self.ids)}], found {found}", field=query)
        if len(self.ids) != len(self.scores):
            raise InputError(f"there are {len(self.ids)} units but {len(self.scores)} scores", field=query)
        check_unit_ids(self.ids)
        if self.tokens is not None:
            self.tokens.check(self.scores, query)
        if not np.isfinite(self.scores).all():
            wrong = np.flatnonzero(~np.isfinite(self.scores))
            first = f"the first is {self.scores[wrong[0]]} for the unit {self.ids[wrong[0]]!r}"
            raise NonFiniteError(f"{query}: {len(wrong)} of {len(self.scores)} scores are not finite; {first}")

    def __eq__(self, other: object) -> bool:
        """Bitwise equality of scores, and equality of all else."""
        return (
            isinstance(other, ScoreTable)
            and (self.facts, self.ids, self.scores.dtype) == (other.facts, other.ids, other.scores.dtype)
            and self.scores.tobytes() == other.scores.tobytes()
            and self.tokens == other.tokens
        )

    __hash__ = None  # type: ignore[assignment]


def write_score_table(table: ScoreTable, path: Path) -> None:
    """Writes a local Parquet file. Equal tables give equal bytes under one pyarrow version."""
    tokens = table.tokens
    schema = pa.schema(
        [
            pa.field("unit", pa.string(), nullable=False, metadata={"description": f"id of the {table.facts.unit}"}),
            pa.field("index", pa.int64(), nullable=False, metadata={"description": "score row"}),
            pa.field(
                "score",
                pa.from_numpy_dtype(table.scores.dtype),
                nullable=False,
                metadata={"description": SIGN_CONVENTION},
            ),
            *([] if tokens is None else token_fields(tokens)),
        ],
        metadata=file_metadata(
            "score_table", facts_as_text(table.facts) | {"dtype": str(table.scores.dtype), "rows": str(len(table.ids))}
        ),
    )
    columns = [pa.array(table.ids, pa.string()), pa.array(range(len(table.ids)), pa.int64()), pa.array(table.scores)]
    columns += [] if tokens is None else token_columns(tokens)
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), path, compression="zstd")


def read_score_table(path: Path) -> ScoreTable:
    """Reads a file of `write_score_table`, verifying all it says of itself.

    Raises:
        DamagedObjectError: it is no such file, or its rows are not what its metadata says.
        InputError: a newer version wrote it. NonFiniteError: a score is not finite.
    """
    content, facts = read_described(path, "score_table")
    expected = {"unit": pa.string(), "index": pa.int64(), "score": _arrow_dtype(path, facts.get("dtype"))}
    if facts.get("unit") == "token":
        expected |= token_types(expected["score"])
    found = {field.name: field.type for field in content.schema}
    if found != expected:
        raise DamagedObjectError(f"{path}: the columns should be {_named(expected)}, found {_named(found)}")
    if str(content.num_rows) != facts["rows"]:
        raise DamagedObjectError(f"{path}: {facts['rows']} rows were written, found {content.num_rows}")
    if any(column.null_count for column in content.columns):
        raise DamagedObjectError(f"{path}: a value is missing")
    if not np.array_equal(content["index"].to_numpy(), np.arange(content.num_rows)):
        raise DamagedObjectError(f"{path}: the score rows are not 0 .. {content.num_rows - 1} in order")
    try:
        tokens = read_tokens(content) if facts.get("unit") == "token" else None
        ids, scores = tuple(content["unit"].to_pylist()), content["score"].to_numpy()
        return ScoreTable(facts_from_text(facts), ids, scores, tokens)
    except (InputError, KeyError, TypeError, ValueError) as error:
        raise DamagedObjectError(f"{path}: {error}") from error


def check_unit_ids(ids: tuple[str, ...]) -> None:
    """Raises InputError unless the ids are distinct and valid Unicode. Examples with equal ids share one row."""
    if len(set(ids)) != len(ids):
        seen: set[str] = set()
        again = next(unit for unit in ids if unit in seen or seen.add(unit))  # type: ignore[func-returns-value]
        raise InputError(f"the unit id {again!r} is given twice", field="units")
    for unit in ids:
        try:
            unit.encode()
        except (AttributeError, UnicodeEncodeError):
            raise InputError(f"the unit id {unit!r} is not valid text", field="units") from None


def file_metadata(kind: str, facts: Mapping[str, str]) -> dict[str, str]:
    """Key-value metadata of a file of this project."""
    described = {"kind": kind, "schema_version": str(SCHEMA_VERSION), "sign_convention": SIGN_CONVENTION, **facts}
    return {PREFIX + name: value for name, value in described.items()}


def read_described(path: Path, kind: str) -> tuple[pa.Table, dict[str, str]]:
    """A Parquet file of this project and its facts. Raises as `read_score_table`."""
    try:
        content = pq.read_table(path)
        metadata = content.schema.metadata or {}
        text = {key.decode(): value.decode() for key, value in metadata.items()}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedObjectError(f"{path}: cannot be read as Parquet: {error}") from error
    facts = {key.removeprefix(PREFIX): value for key, value in text.items() if key.startswith(PREFIX)}
    if facts.get("kind") != kind:
        raise DamagedObjectError(f"{path}: should be a {kind} of magic_pipeline, found {facts.get('kind', 'none')}")
    if facts.get("schema_version") != str(SCHEMA_VERSION):
        version = facts.get("schema_version")
        raise InputError(f"has schema version {version}; this magic_pipeline reads {SCHEMA_VERSION}", file=path)
    return content, facts


def facts_as_text(facts: ScoreFacts) -> dict[str, str]:
    """One text per fact, for key-value metadata."""
    return asdict(facts) | {"versions": json.dumps(dict(facts.versions), sort_keys=True)}


def facts_from_text(text: Mapping[str, str]) -> ScoreFacts:
    """The inverse of `facts_as_text`. Raises KeyError for a fact that is missing."""
    values: dict[str, Any] = {field.name: text[field.name] for field in fields(ScoreFacts)}
    return ScoreFacts(**values | {"versions": json.loads(text["versions"])})


def _arrow_dtype(path: Path, dtype: str | None) -> pa.DataType:
    if dtype not in ("float32", "float64"):
        raise DamagedObjectError(f"{path}: the dtype should be float32 or float64, found {dtype}")
    return pa.from_numpy_dtype(np.dtype(dtype))


def _named(columns: Mapping[str, pa.DataType]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())
