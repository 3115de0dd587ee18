"""A score table comes back bit for bit, says what it is, and is refused when anything about it is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from magic_pipeline.attribution.queries import partition_key
from magic_pipeline.attribution.score_table import ScoreFacts, ScoreTable, read_score_table, write_score_table
from magic_pipeline.errors import DamagedObjectError, InputError, NonFiniteError

DIFFICULT_IDS = (
    "a|b",
    "../x",
    "q...1",
    "é",
    "x" * 300,
    "Case",
    "case",
    "e\u0301",
    "a\nb",
    '"',
    "a\x00b",
    "unit",
    "日本",
)


def facts(query_id: str = "q") -> ScoreFacts:
    return ScoreFacts(
        experiment="digits",
        query_id=query_id,
        query_key=partition_key(query_id),
        query_digest="d" * 64,
        fingerprint="f" * 64,
        trajectory_digest="t" * 64,
        walk_digest="w" * 64,
        unit="example",
        versions=MappingProxyType({"torch": "2.13.0", "numpy": "2.4"}),
    )


def table(
    query_id: str = "q", ids: tuple[str, ...] = DIFFICULT_IDS, dtype: str = "float64", seed: int = 0
) -> ScoreTable:
    scores = np.random.default_rng(seed).standard_normal(len(ids)).astype(dtype)
    return ScoreTable(facts(query_id), ids, scores)


any_text = st.text(st.characters(codec="utf-8"), min_size=1)


@settings(max_examples=30)
@given(
    st.lists(any_text, unique=True, max_size=5),
    any_text,
    st.sampled_from(["float32", "float64"]),
    st.data(),
)
def test_any_table_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str], query_id: str, dtype: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tables") / "q.parquet"
    finite = hnp.from_dtype(np.dtype(dtype), allow_nan=False, allow_infinity=False)
    scores = data.draw(hnp.arrays(dtype, len(ids), elements=finite))
    written = ScoreTable(facts(query_id), tuple(ids), scores)
    write_score_table(written, path)
    assert read_score_table(path) == written


def test_the_file_explains_itself_to_any_reader(tmp_path: Path) -> None:
    write_score_table(table("é|x", dtype="float32"), tmp_path / "q.parquet")
    schema = pq.read_schema(tmp_path / "q.parquet")
    assert [(field.name, str(field.type)) for field in schema] == [
        ("unit", "string"),
        ("index", "int64"),
        ("score", "float"),
    ]
    said = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    assert said["magic_pipeline.query_id"] == "é|x"
    assert said["magic_pipeline.schema_version"] == "1"
    assert "negative score means that more weight on the unit lowers the loss" in said["magic_pipeline.sign_convention"]
    assert said["magic_pipeline.fingerprint"] == "f" * 64
    assert said["magic_pipeline.rows"] == str(len(DIFFICULT_IDS))


def test_equal_tables_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_score_table(table(), tmp_path / name)
    write_score_table(table(seed=1), tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_never_written(value: float) -> None:
    with pytest.raises(
        NonFiniteError, match=r"query 'q': 1 of 3 scores are not finite; the first is -?(nan|inf) for the unit 'b'"
    ):
        ScoreTable(facts(), ("a", "b", "c"), np.array([1.0, value, 2.0]))


@pytest.mark.parametrize(
    ("ids", "scores", "message"),
    [
        (("a", "b", "a"), np.zeros(3), "units: the unit id 'a' is given twice"),
        (("a",), np.zeros(2), "query 'q': there are 1 units but 2 scores"),
        (("a",), np.zeros((1, 1)), r"query 'q': scores should be float32 or float64 \[1\], found float64 \[1, 1\]"),
        (("a",), np.zeros(1, np.float16), r"query 'q': scores should be float32 or float64 \[1\], found float16 \[1\]"),
        (("\ud800",), np.zeros(1), r"units: the unit id '\\ud800' is not valid text"),
    ],
)
def test_what_is_no_score_table_is_refused(ids: tuple[str, ...], scores: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScoreTable(facts(), ids, scores)


def rewritten(path: Path, content: pa.Table, **said: str) -> Path:
    """A file of another program's making, with some of its metadata changed."""
    metadata = {
        **(content.schema.metadata or {}),
        **{f"magic_pipeline.{k}".encode(): v.encode() for k, v in said.items()},
    }
    pq.write_table(content.replace_schema_metadata(metadata), path)
    return path


def test_a_file_whose_rows_are_not_what_it_says_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "q.parquet"
    write_score_table(table(ids=("a", "b", "c")), path)
    content = pq.read_table(path)
    doubled = content.set_column(0, content.schema.field(0), pa.array(["a", "b", "a"]))
    nan = content.set_column(2, content.schema.field(2), pa.array([0.0, np.nan, 1.0]))
    changes: list[tuple[pa.Table, dict[str, str], str]] = [
        (content.slice(0, 2), {}, "3 rows were written, found 2"),
        (content.take([1, 0, 2]), {}, r"the score rows are not 0 \.\. 2 in order"),
        (content.drop_columns("index"), {}, "the columns should be"),
        (doubled, {}, "the unit id 'a' is given twice"),
        (content, {"dtype": "float32"}, "the columns should be unit string, index int64, score float"),
        (content, {"dtype": "int8"}, "the dtype should be float32 or float64, found int8"),
        (content, {"kind": "other"}, "should be a score_table of magic_pipeline, found other"),
        (content, {"versions": "{"}, "Expecting property name"),
    ]
    for changed, said, message in changes:
        with pytest.raises(DamagedObjectError, match=message) as caught:
            read_score_table(rewritten(path, changed, **said))
        assert str(caught.value).startswith(str(path))
    with pytest.raises(NonFiniteError):
        read_score_table(rewritten(path, nan))
    with pytest.raises(InputError, match="has schema version 2; this magic_pipeline reads 1"):
        read_score_table(rewritten(path, content, schema_version="2"))


def test_a_file_that_is_no_parquet_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "q.parquet"
    write_score_table(table(), path)
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"PAR1" + b"\0" * 50):
        path.write_bytes(damaged)
        with pytest.raises(DamagedObjectError, match="cannot be read as Parquet"):
            read_score_table(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(DamagedObjectError, match="should be a score_table of magic_pipeline, found none"):
        read_score_table(path)


def test_tables_differ_by_any_bit_or_fact() -> None:
    assert table() == table()
    assert table() != replace(table(), scores=np.nextafter(table().scores, 1))
    assert table() != table("r")
    assert ScoreTable(facts(), ("a",), np.array([0.0])) != ScoreTable(facts(), ("a",), np.array([-0.0]))
