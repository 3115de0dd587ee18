"""Scores come back from every exported format, from the experiment and from its storage; other tools' are compared by ids."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats  # type: ignore[import-untyped]

import magic_pipeline
from magic_pipeline import cli
from magic_pipeline.attribution.comparing import compare, read_foreign_scores
from magic_pipeline.attribution.score_matrix import MatrixFormat, ScoreMatrix, combine, write_score_matrix_file
from magic_pipeline.attribution.score_matrix_files import read_exported_scores
from magic_pipeline.errors import DamagedObjectError, InputError
from tests.attribution.running import open_small, run
from tests.attribution.test_score_matrix import UNITS, table

FORMATS: list[tuple[MatrixFormat, str]] = [
    ("parquet", ".parquet"),
    ("parquet_wide", ".parquet"),
    ("arrow", ".arrow"),
    ("csv", ".csv"),
    ("npz", ".npz"),
]


def matrix(dtype: str = "float32") -> ScoreMatrix:
    return combine([table("a|b", dtype), table("é\n", dtype), table("third", dtype)])


def same(found: ScoreMatrix, expected: ScoreMatrix) -> bool:
    tables = [(one.table(at), expected.table(at)) for one in (found,) for at in range(len(expected.facts))]
    return len(found.facts) == len(expected.facts) and all(mine == other for mine, other in tables)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("format_", "suffix"), FORMATS)
def test_every_format_gives_back_every_bit_id_and_fact(
    tmp_path: Path, format_: MatrixFormat, suffix: str, dtype: str
) -> None:
    file = tmp_path / f"scores{suffix}"
    write_score_matrix_file(matrix(dtype), file, format_)
    assert same(read_exported_scores(file), matrix(dtype))
    assert same(magic_pipeline.load_scores(file), matrix(dtype))


@pytest.mark.parametrize(("format_", "suffix"), FORMATS)
def test_a_file_that_was_cut_is_refused(tmp_path: Path, format_: MatrixFormat, suffix: str) -> None:
    file = tmp_path / f"scores{suffix}"
    write_score_matrix_file(matrix(), file, format_)
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    with pytest.raises(DamagedObjectError, match=str(file)):
        read_exported_scores(file)


def test_hugging_face_datasets_read_arrow_and_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    write_score_matrix_file(matrix(), tmp_path / "scores.arrow", "arrow")
    write_score_matrix_file(matrix(), tmp_path / "scores.parquet", "parquet")
    found = [
        datasets.Dataset.from_file(str(tmp_path / "scores.arrow")),
        datasets.Dataset.from_parquet(str(tmp_path / "scores.parquet"), cache_dir=str(tmp_path / "cache")),
    ]
    for one in found:
        assert one.column_names == ["query", "unit", "index", "score"]
        assert list(one["unit"]) == list(UNITS) * 3
        assert np.array(one["score"], dtype=np.float32).tobytes() == matrix().scores.T.tobytes()


def test_a_notebook_gets_a_frame_with_ids_and_provenance() -> None:
    frame = matrix().to_pandas()
    assert list(frame.index) == list(UNITS) and list(frame.columns) == ["a|b", "é\n", "third"]
    assert frame.loc["01", "third"] == matrix().scores[-1, 2]
    assert frame.attrs["queries"][0]["fingerprint"] == "f" * 64 and "negative score" in frame.attrs["sign_convention"]
    assert isinstance(frame, pd.DataFrame)


def test_without_xarray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(InputError, match="needs xarray, which is not installed"):
        matrix().to_xarray()


def test_scores_are_loaded_from_the_experiment_file_and_from_the_folder_in_the_storage(
    tmp_path: Path, undisturbed: Any
) -> None:
    opened = open_small(tmp_path)
    with pytest.raises(InputError, match="there is no training in"):
        magic_pipeline.load_scores(tmp_path / "small.yaml")
    expected = run(opened).numpy()
    for source in (tmp_path / "small.yaml", tmp_path / "store" / "small", f"{tmp_path}/store/small/"):
        found = magic_pipeline.load_scores(source)
        assert found.scores.tobytes() == expected.tobytes()
        assert found.query_ids == ("first", "second", "third") and found.ids == opened.units
    assert magic_pipeline.load_scores(tmp_path / "small.yaml", fingerprint=opened.fingerprint[:6]).ids == opened.units
    with pytest.raises(InputError, match="there is no training 'zz'"):
        magic_pipeline.load_scores(tmp_path / "small.yaml", fingerprint="zz")


def test_importing_the_package_and_loading_scores_needs_no_torch(tmp_path: Path) -> None:
    write_score_matrix_file(matrix(), tmp_path / "scores.npz", "npz")
    code = (
        "import sys, magic_pipeline; assert 'numpy' not in sys.modules;"
        f"magic_pipeline.load_scores({str(tmp_path / 'scores.npz')!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(magic_pipeline.__file__).parents[1])


def foreign(folder: Path, kind: str) -> tuple[Path, dict[str, dict[str, float]]]:
    """A file of another tool: noisy scores of opposite sign, one query less and one more, one unit less and one more."""
    ours, noise = matrix("float64"), np.random.default_rng(0)
    units, queries = [*UNITS[1:], "stranger"], ["a|b", "third", "fourth"]
    columns = {
        query: -3
        * np.append(ours.column(ours.query_ids.index(query))[1:] if query in ours.query_ids else noise.random(15), 1)
        + 0.1 * noise.standard_normal(len(units))
        for query in queries
    }
    file = folder / f"theirs.{kind.partition(' ')[0]}"
    if kind == "npz":
        np.savez(
            file, scores=np.stack(list(columns.values()), 1), unit_ids=np.array(units), query_ids=np.array(queries)
        )
    elif kind == "csv":
        with file.open("w", newline="", encoding="utf-8") as text:
            writer = csv.writer(text)
            writer.writerow(("query", "unit", "made by", "score"))
            writer.writerows((q, u, "tool", s) for q in queries for u, s in zip(units, columns[q], strict=True))
    elif kind == "parquet wide":
        pq.write_table(pa.table({"unit": units, **columns}), file)
    else:
        rows = [{"query": q, "unit": u, "score": s} for q in queries for u, s in zip(units, columns[q], strict=True)]
        pq.write_table(pa.Table.from_pylist(rows), file)
    return file, {query: dict(zip(units, column.tolist(), strict=True)) for query, column in columns.items()}


@pytest.mark.parametrize("kind", ["npz", "csv", "parquet", "parquet wide"])
def test_another_tools_scores_are_compared_by_ids_and_what_one_side_lacks_is_told(tmp_path: Path, kind: str) -> None:
    file, theirs = foreign(tmp_path, kind)
    ours = matrix("float64")
    found = compare(ours, read_foreign_scores(file))
    assert [row.query for row in found.queries] == ["a|b", "third"] and {row.units for row in found.queries} == {15}
    for row in found.queries:
        mine = ours.column(ours.query_ids.index(row.query))[1:]
        other = [theirs[row.query][unit] for unit in UNITS[1:]]
        assert row.spearman == pytest.approx(scipy.stats.spearmanr(mine, other).statistic, abs=1e-12)
        assert (
            row.pearson == pytest.approx(scipy.stats.pearsonr(mine, other).statistic, abs=1e-12) and row.pearson < -0.9
        )
        assert row.slope == pytest.approx(np.polyfit(mine, other, 1)[0], rel=1e-9)
    assert (found.queries_only_here, found.queries_only_there) == (("é\n",), ("fourth",))
    assert (found.units_only_here, found.units_only_there) == ((UNITS[0],), ("stranger",))
    assert "1 units are not in the experiment; the first is 'stranger'" in found.lines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unit,score\na,1\n", "none of the experiment's queries"),
        ("query,unit\nthird,1\n", "has no column 'score'; found query, unit"),
        ("query,score\nthird,1\n", "has no column 'unit'"),
        ("query,unit,score\nthird,a,x\n", "the score of 'a' for the query 'third' is 'x'"),
        ("query,unit,score\nthird,a,1\nthird,a,2\n", "gives a score of 'a' for the query 'third' twice"),
        ("query,unit,score\nthird,nobody,1\n", "none of the experiment's units; the first there is 'nobody'"),
    ],
)
def test_a_file_that_says_nothing_about_these_scores_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "theirs.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        compare(matrix(), read_foreign_scores(file))


def test_the_command_compares_with_an_export_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(open_small(tmp_path))
    path, file = str(tmp_path / "small.yaml"), str(tmp_path / "scores.arrow")
    assert cli.main(["export", path, "--format", "arrow", "--output", file]) == 0
    capsys.readouterr()
    assert cli.main(["compare", path, file, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [(q["units"], round(q["spearman"], 12), round(q["slope"], 12)) for q in content["queries"]] == [
        (12, 1, 1)
    ] * 3
    assert cli.main(["compare", path, str(tmp_path / "none.csv")]) == 2
    assert "there is no such file" in capsys.readouterr().err
