"""Where the queries of an experiment come from: its `queries:` section, and a queries file's lines. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magic_pipeline.errors import InputError


@dataclass(frozen=True)
class QuerySource:
    """The `queries:` section: a JSONL file, or the first `count` (default: all) examples of a split of the task's data.

    Raises:
        InputError: neither or both of file and split; a count without a split, or below 1.
    """

    file: Path | None = None
    split: str | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (self.split is None):
            raise InputError("give either file (JSONL, one query a line) or split, not both", field="queries")
        if self.count is not None and self.split is None:
            raise InputError("count goes with split; with file, every line is a query", field="queries.count")
        if self.count is not None and self.count < 1:
            raise InputError(f"expected at least 1 query, found {self.count}", field="queries.count")

    def check_split(self, *known: str) -> None:
        """Raises InputError unless `split` is one of the splits that the task has."""
        if self.split not in known:
            raise InputError(f"no split {self.split!r}; this task has {', '.join(known)}", field="queries.split")


@dataclass(frozen=True)
class QueryLine:
    """One line of a queries file: its id, and its other fields as the task names them."""

    file: Path
    number: int
    id: str
    fields: Mapping[str, Any]

    def error(self, message: str) -> InputError:
        """An InputError that names the file, the line and the query."""
        return InputError(f"line {self.number}: {message}", file=self.file, field=f"query {self.id!r}")

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Within, what is wrong with the query names the file and the line too."""
        try:
            yield
        except InputError as error:
            if error.file is not None:
                raise
            raise self.error(error.message) from error

    def weighted_examples(self, columns: frozenset[str]) -> tuple[list[Mapping[str, Any]], list[float]]:
        """The query's examples, each a mapping of columns, with their coefficients (none: the mean).

        A line is one example (`{"id": "q", "text": "..."}`), a set (`{"id": "q", "examples": [{"text": "..."}, ...]}`, perhaps with
        `"coefficients": [...]`), or a contrast, the mean of one set minus that of another (`{"id": "q", "positive": [...],
        "negative": [...]}`).

        Raises:
            InputError: naming file, line and query: a field that nobody reads, an empty set, or something that is no example.
        """
        other = frozenset({"measurement"})
        if "examples" in self.fields:
            self.check_fields(required=frozenset({"examples"}), optional=other | {"coefficients"})
            coefficients = self.fields.get("coefficients", [])
            if not isinstance(coefficients, list):
                raise self.error("expected coefficients to be a list of numbers")
            return self._examples("examples"), coefficients
        if "positive" in self.fields or "negative" in self.fields:
            self.check_fields(required=frozenset({"positive", "negative"}), optional=other)
            positive, negative = self._examples("positive"), self._examples("negative")
            return positive + negative, [1 / len(positive)] * len(positive) + [-1 / len(negative)] * len(negative)
        self.check_fields(required=columns, optional=other)
        return [{name: self.fields[name] for name in columns}], []

    def _examples(self, name: str) -> list[Mapping[str, Any]]:
        found = self.fields[name]
        if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
            raise self.error(f"expected {name} to be a list of at least one example, each an object of columns")
        return found

    def check_fields(self, *, required: frozenset[str], optional: frozenset[str] = frozenset()) -> None:
        """Raises InputError for a required field that is missing and for a field that nobody reads."""
        for name in sorted(required - set(self.fields)):
            raise self.error(f"field {name!r} is missing")
        for name in sorted(set(self.fields) - required - optional):
            raise self.error(f"unknown field {name!r}; known: {', '.join(sorted({'id'} | required | optional))}")


def read_query_lines(file: Path) -> list[QueryLine]:
    """The queries of a JSONL file, in its order; blank lines are skipped.

    Each line is an object with `id`, a non-empty string that no other line has.

    Raises:
        InputError: the file is missing, not UTF-8, not JSONL, empty, or an id is missing, empty or repeated.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(
            f"the queries file cannot be read ({error.strerror})", file=file, field="queries.file"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"expected UTF-8 text, found another encoding ({error.reason})", file=file) from error
    found: dict[str, QueryLine] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        query = _parse(file, number, line)
        if query.id in found:
            raise query.error(f"line {found[query.id].number} has this id already; query ids are unique")
        found[query.id] = query
    if not found:
        raise InputError("expected at least one query, found none", file=file, field="queries.file")
    return list(found.values())


def _parse(file: Path, number: int, line: str) -> QueryLine:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"line {number}: not JSON ({error.msg} at column {error.colno})", file=file) from error
    if not isinstance(content, dict):
        raise InputError(
            f'line {number}: expected an object like {{"id": "a name", ...}}, found {line.strip()[:40]}', file=file
        )
    identity = content.pop("id", None)
    if not isinstance(identity, str) or not identity:
        raise InputError(f"line {number}: expected id to be a non-empty string, found {identity!r}", file=file)
    return QueryLine(file, number, identity, content)
