"""The `queries:` section and the lines of a queries file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.query_source import QuerySource, read_query_lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "queries: give either file"),
        ({"file": Path("q"), "split": "test"}, "queries: give either file"),
        ({"file": Path("q"), "count": 2}, "queries.count: count goes with split"),
        ({"split": "test", "count": 0}, "queries.count: expected at least 1 query, found 0"),
    ],
)
def test_a_source_is_a_file_or_a_split(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        QuerySource(**arguments)


def test_lines_keep_their_order_their_ids_and_their_fields(tmp_path: Path) -> None:
    file = tmp_path / "queries.jsonl"
    # A line separator inside a text is not the end of a JSON line.
    file.write_text('{"id": "a|b", "text": "x"}\n\n{"id": "A|b"}\r\n{"id": "\u00e9\u2028", "n": [1]}', encoding="utf-8")
    lines = read_query_lines(file)
    assert [(line.number, line.id, dict(line.fields)) for line in lines] == [
        (1, "a|b", {"text": "x"}),
        (3, "A|b", {}),
        (4, "\u00e9\u2028", {"n": [1]}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected at least one query, found none"),
        (b"\n \n", "expected at least one query, found none"),
        (b'{"id": "a"}\n{"id": ', "line 2: not JSON"),
        (b"[1]", "line 1: expected an object"),
        (b'{"text": "x"}', "line 1: expected id to be a non-empty string, found None"),
        (b'{"id": ""}', "line 1: expected id to be a non-empty string, found ''"),
        (b'{"id": 3}', "line 1: expected id to be a non-empty string, found 3"),
        (b'{"id": "a"}\n{"id": "b"}\n{"id": "a"}', "query 'a': line 3: line 1 has this id already"),
        (b'{"id": "\xff"}', "expected UTF-8 text"),
    ],
)
def test_a_wrong_file_is_refused_with_file_line_and_id(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "queries.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError) as raised:
        read_query_lines(file)
    assert str(raised.value).startswith(str(file))
    assert message in str(raised.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl: queries\.file: the queries file cannot be read"):
        read_query_lines(tmp_path / "nowhere.jsonl")


def test_fields_are_checked_by_name(tmp_path: Path) -> None:
    file = tmp_path / "queries.jsonl"
    file.write_text('{"id": "q", "txt": "x"}')
    (line,) = read_query_lines(file)
    with pytest.raises(InputError, match="query 'q': line 1: field 'text' is missing"):
        line.check_fields(required=frozenset({"text"}))
    with pytest.raises(InputError, match="line 1: unknown field 'txt'; known: id, text"):
        line.check_fields(required=frozenset(), optional=frozenset({"text"}))
