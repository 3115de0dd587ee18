"""Query ids of any kind become keys that are safe everywhere and never merge."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magic_pipeline.attribution import queries
from magic_pipeline.attribution.queries import partition_key, partition_keys
from magic_pipeline.errors import InputError

DIFFICULT_IDS = (
    "a|b",
    "../x",
    "q...1",
    "é",
    "x" * 300,
    "Case",
    "case",
    " ",
    "\x00",
    "a,b",
    "-rf",
    "e\u0301",
    "日本",
    "CON",
    ".",
)
SAFE_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,23}-[0-9a-f]{8}")

any_text = st.text(st.characters(codec="utf-8"), min_size=1)


@given(any_text)
def test_every_key_is_safe_in_partitions_paths_and_shells(query_id: str) -> None:
    assert SAFE_KEY.fullmatch(partition_key(query_id))


@given(st.lists(any_text, min_size=1, unique=True))
def test_different_ids_never_merge_even_where_case_is_ignored(ids: list[str]) -> None:
    keys = partition_keys(ids)
    assert list(keys) == ids
    assert len({key.casefold() for key in keys.values()}) == len(ids)


def test_difficult_ids_are_accepted_together() -> None:
    keys = partition_keys(DIFFICULT_IDS)
    assert tuple(keys) == DIFFICULT_IDS
    assert all(SAFE_KEY.fullmatch(key) for key in keys.values())


def test_keys_are_the_same_in_every_version() -> None:
    """Keys are storage paths: another key for the same id would orphan sealed work."""
    assert partition_key("a|b") == "a_b-0eab8a0a"
    assert partition_key("é") == "query-4a99557e"
    assert partition_key("digit 7, row 12") == "digit_7_row_12-a8d15ceb"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "there are no queries"),
        (["a", ""], "query 2: a query id is empty"),
        (["a", "b", "a"], "the query id 'a' is given twice: queries 1 and 3"),
        (["a", 7], "query 2: a query id must be a string, found 7 (int)"),
        (["\ud800"], r"query 1: the query id '\ud800' is not valid Unicode (a lone surrogate)"),
    ],
)
def test_wrong_ids_are_named(ids: list[str], message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        partition_keys(ids)


def test_a_long_duplicate_is_shown_on_one_short_line() -> None:
    with pytest.raises(InputError) as caught:
        partition_keys(["line\n" * 100] * 2)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


def test_two_ids_with_one_key_are_refused_and_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hashes cut to nothing, ids that differ only in case collide as any two could by chance."""
    monkeypatch.setattr(queries, "_HASHED", 0)
    with pytest.raises(InputError, match=r"the query ids 'Case' and 'case' have the same partition key"):
        partition_keys(["Case", "case"])
