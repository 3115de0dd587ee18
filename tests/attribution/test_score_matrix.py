"""Tables put together come back from every format with their ids, bits and provenance, or are refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from magic_pipeline.attribution.queries import partition_key
from magic_pipeline.attribution.score_matrix import (
    MatrixFormat,
    ScoreMatrix,
    combine,
    read_score_matrix_file,
    write_score_matrix_file,
)
from magic_pipeline.attribution.score_table import ScoreFacts, ScoreTable
from magic_pipeline.errors import DamagedObjectError, InputError, StorageError

DIFFICULT_IDS = (
    "a|b",
    "../x",
    "q...1",
    "é",
    "x" * 300,
    "Case",
    "case",
    "e\u0301",
    "a\r\nb",
    '"',
    ",",
    "unit",
    "index",
    "=1+1",
)
UNITS = (*DIFFICULT_IDS, "1", "01")


def table(query_id: str, dtype: str = "float32") -> ScoreTable:
    facts = ScoreFacts(
        experiment="digits",
        query_id=query_id,
        query_key=partition_key(query_id),
        query_digest="d",
        fingerprint="f" * 64,
        trajectory_digest="t",
        walk_digest=f"walk of {query_id}",
        unit="example",
        versions={"torch": "2.13.0"},
    )
    scores = np.random.default_rng(len(query_id)).standard_normal(len(UNITS)).astype(dtype)
    scores[0] = np.finfo(dtype).smallest_subnormal
    return ScoreTable(facts, UNITS, scores)


def matrix(dtype: str = "float32") -> ScoreMatrix:
    return combine([table(query_id, dtype) for query_id in DIFFICULT_IDS])


def test_the_matrix_is_its_tables_side_by_side() -> None:
    assert matrix().scores.shape == (len(UNITS), len(DIFFICULT_IDS))
    assert matrix().query_ids == DIFFICULT_IDS
    assert [matrix().table(query) for query in range(3)] == [table(query_id) for query_id in DIFFICULT_IDS[:3]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_parquet_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    assert write_score_matrix_file(matrix(dtype), tmp_path / "m.parquet", "parquet_wide") == len(UNITS)
    found = read_score_matrix_file(tmp_path / "m.parquet")
    assert (found.facts, found.ids) == (matrix(dtype).facts, UNITS)
    assert found.scores.dtype == dtype
    assert found.scores.tobytes() == matrix(dtype).scores.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_parquet_has_a_row_per_query_and_unit(tmp_path: Path, dtype: str) -> None:
    rows = write_score_matrix_file(matrix(dtype), tmp_path / "m.parquet", "parquet")
    found = pq.read_table(tmp_path / "m.parquet")
    assert rows == found.num_rows == len(UNITS) * len(DIFFICULT_IDS)
    assert found.column_names == ["query", "unit", "index", "score"]
    assert found["query"].to_pylist() == [query for query in DIFFICULT_IDS for _ in UNITS]
    assert found["unit"].to_pylist() == list(UNITS) * len(DIFFICULT_IDS)
    assert found["index"].to_pylist() == list(range(len(UNITS))) * len(DIFFICULT_IDS)
    assert found["score"].to_numpy().tobytes() == matrix(dtype).scores.T.tobytes()
    queries = json.loads(found.schema.metadata[b"magic_pipeline.queries"])
    assert [query["query_id"] for query in queries] == list(DIFFICULT_IDS)
    assert {query["fingerprint"] for query in queries} == {"f" * 64}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_csv_gives_the_same_ids_and_bits_back(tmp_path: Path, dtype: str) -> None:
    rows = write_score_matrix_file(matrix(dtype), tmp_path / "m.csv", "csv")
    with (tmp_path / "m.csv").open(encoding="utf-8", newline="") as file:
        header, *found = csv.reader(file)
    assert header == ["query", "unit", "index", "score"]
    assert rows == len(found)
    assert [row[0] for row in found] == [query for query in DIFFICULT_IDS for _ in UNITS]
    assert [row[1] for row in found] == list(UNITS) * len(DIFFICULT_IDS)
    assert np.array([row[3] for row in found]).astype(dtype).tobytes() == matrix(dtype).scores.T.tobytes()
    said = json.loads((tmp_path / "m.csv.json").read_text(encoding="utf-8"))
    assert [query["query_id"] for query in said["queries"]] == list(DIFFICULT_IDS)
    assert said["dtype"] == dtype


def test_npz_needs_no_pickle(tmp_path: Path) -> None:
    assert write_score_matrix_file(matrix(), tmp_path / "m.npz", "npz") == len(UNITS)
    with np.load(tmp_path / "m.npz", allow_pickle=False) as found:
        assert tuple(found["query_ids"].tolist()) == DIFFICULT_IDS
        assert tuple(found["unit_ids"].tolist()) == UNITS
        assert found["scores"].tobytes() == matrix().scores.tobytes()
        said = json.loads(str(found["meta"]))
    assert said["queries"][3]["query_id"] == "é"
    assert "sign_convention" in said


def test_npz_refuses_an_id_that_it_would_change(tmp_path: Path) -> None:
    ending = combine([table("a\x00")])
    with pytest.raises(InputError, match="an id ends in a NUL character"):
        write_score_matrix_file(ending, tmp_path / "m.npz", "npz")
    assert list(tmp_path.iterdir()) == []
    write_score_matrix_file(ending, tmp_path / "m.parquet", "parquet_wide")
    assert read_score_matrix_file(tmp_path / "m.parquet").query_ids == ("a\x00",)


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        (
            "fingerprint",
            "g" * 64,
            f"query 'b': its fingerprint is {'g' * 64}, that of the queries before it is {'f' * 64}",
        ),
        ("trajectory_digest", "u", "query 'b': its trajectory_digest is u, that of the queries before it is t"),
        ("experiment", "other", "query 'b': its experiment is other"),
        ("query_id", "a", "query 'a': is given twice"),
    ],
)
def test_tables_of_another_training_are_refused(change: str, value: str, message: str) -> None:
    other = replace(table("b"), facts=replace(table("b").facts, **{change: value}))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        combine([table("a"), other])


def test_tables_of_other_units_or_dtype_are_refused() -> None:
    with pytest.raises(InputError, match="query 'b': its units are not those of the first query"):
        combine([table("a"), replace(table("b"), ids=UNITS[::-1])])
    with pytest.raises(InputError, match="query 'b': its dtype is float64, that of the queries before it is float32"):
        combine([table("a"), table("b", "float64")])
    with pytest.raises(InputError, match="there are no finished queries to put together"):
        combine([])


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.npz"
    write_score_matrix_file(matrix(), path, "npz")
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(StorageError, match=r"m\.npz: cannot be written: No space left on device"):
        write_score_matrix_file(matrix(), path, "npz")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_wrong_output_or_format_is_one_clear_line(tmp_path: Path) -> None:
    for output in (tmp_path / "none" / "m.csv", tmp_path):
        with pytest.raises(InputError, match="output: should be a file in a folder that exists"):
            write_score_matrix_file(matrix(), output, "csv")
    wrong: MatrixFormat = "xlsx"  # type: ignore[assignment]
    with pytest.raises(
        InputError, match="format: should be one of parquet, parquet_wide, csv, npz, arrow, found 'xlsx'"
    ):
        write_score_matrix_file(matrix(), tmp_path / "m", wrong)


def test_a_matrix_file_of_another_kind_is_damaged(tmp_path: Path) -> None:
    write_score_matrix_file(matrix(), tmp_path / "long.parquet", "parquet")
    with pytest.raises(DamagedObjectError, match="should be a score_matrix of magic_pipeline, found score_list"):
        read_score_matrix_file(tmp_path / "long.parquet")
    write_score_matrix_file(matrix(), tmp_path / "wide.parquet", "parquet_wide")
    content = pq.read_table(tmp_path / "wide.parquet")
    pq.write_table(content.drop_columns("score:é"), tmp_path / "wide.parquet")
    with pytest.raises(DamagedObjectError, match="its columns are not those of its 14 queries"):
        read_score_matrix_file(tmp_path / "wide.parquet")
