"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from magic_pipeline.checkpoints import Chain, Store
from magic_pipeline.cli import main
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.records import Records, records_of
from tests.orchestration.small_experiment import write_experiment


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command line sends this project's log to the stderr of its own process."""
    project = logging.getLogger("magic_pipeline")
    handlers, level = list(project.handlers), project.level
    yield
    project.handlers[:] = handlers
    project.setLevel(level)


@pytest.fixture(scope="module")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_experiment(tmp_path_factory.mktemp("cli") / "experiments")
    assert main(["run", str(path), "--json"]) == 0
    return path


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """An experiment that `run` has finished, in a folder of its own."""
    return shutil.copytree(_finished.parent, tmp_path / "experiments") / _finished.name


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr of a command that ends with 2."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, ""), shown
    lines = shown.err.splitlines()
    assert len(lines) == 1, shown.err
    return lines[0]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("name: [", "not valid YAML"),
        ("", "empty"),
        ("name: x\ntask: {type: linear_regression}\nepochs: 3\n", "line 3: epochs: unknown field; did you mean"),
        ("name: x\ntask: {type: no_such_task}\nqueries: {split: test}\n", "no_such_task"),
        ("name: x\ntask: {type: 'no_such_module:Task'}\nqueries: {split: test}\n", "no_such_module"),
        (
            "name: x\ntask: {type: linear_regression}\nqueries: {file: missing.jsonl}\n",
            "line 3: queries.file: there is no file",
        ),
        ("name: x-y\ntask: {type: linear_regression}\n", "name"),
    ],
)
def test_a_wrong_experiment_file_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, told: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content)
    for command in ("plan", "run"):
        line = refused(capsys, command, path)
        assert told in line


def test_wrong_arguments_are_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "frobnicate" in refused(capsys, "frobnicate")
    assert "there is no such file" in refused(capsys, "status", tmp_path / "missing.yaml")
    assert "no such experiment file or folder" in refused(capsys, "ui", tmp_path / "missing")
    assert "--format" in refused(capsys, "export", tmp_path / "x.yaml", "--format", "xls")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another port" in refused(capsys, "ui", tmp_path, "--port", taken.getsockname()[1])
    assert "choose another port" in refused(capsys, "ui", tmp_path, "--port", 99999)


def test_a_file_that_dagster_would_not_load_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "experiments"
    first, second = write_experiment(folder, file="a.yaml"), write_experiment(folder, file="b.yaml")
    line = refused(capsys, "run", first)
    assert first.name in line
    assert second.name in line
    second.rename(folder / "b.txt")
    assert "ends in .yaml" in refused(capsys, "run", folder / "b.txt")


def test_a_loss_that_is_not_finite_ends_with_1_and_names_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_experiment(tmp_path / "experiments")
    path.write_text(path.read_text().replace("lr: 0.1", "lr: 1.0e+200"))
    assert main(["run", str(path)]) == 1
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert "step" in shown.err.splitlines()[-1]
    assert shown.err.splitlines()[-1].startswith("magic-pipeline: ")


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "status", str(tmp_path / "missing.yaml")]) == 2
    assert main(["status", str(tmp_path / "missing.yaml"), "--debug"]) == 2
    assert capsys.readouterr().err.count("Traceback") == 2


def test_a_second_run_runs_nothing_and_shows_what_is_there(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(finished)]) == 0
    shown = capsys.readouterr()
    assert "everything is finished already" in shown.out
    assert "3 of 3 queries have scores" in shown.out
    assert "magic-pipeline ui" in shown.out
    assert main(["run", str(finished), "--json", "--queries", "query-1"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []
    assert "no query 'nobody'" in refused(capsys, "run", finished, "--queries", "nobody")


def test_status_says_the_same_with_and_without_dagster(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(finished), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    (stored,) = content["stored"]
    assert stored["trajectory"]["complete"]
    assert [query["complete"] for query in stored["queries"]] == [True] * 3
    assert content["dagster"]["differences"] == []
    assert content["dagster"]["materialized"]["segment_checkpoints"] == 3
    shutil.rmtree(finished.parent / ".magic" / "dagster")
    assert main(["status", str(finished), "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without == {name: value for name, value in content.items() if name != "dagster"}
    assert not (finished.parent / ".magic" / "dagster").exists()


def test_status_names_what_dagster_does_not_know_and_a_run_repairs_it(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(finished.parent / ".magic" / "dagster")
    assert main(["run", str(finished), "--queries", "query-0"]) == 0
    assert main(["status", str(finished)]) == 0
    lines = capsys.readouterr().out.splitlines()
    missing = [line for line in lines if line.endswith("finished in the store, not reported to Dagster")]
    assert len(missing) == 4  # segments and scores of two queries
    assert main(["run", str(finished)]) == 0
    capsys.readouterr()
    assert main(["status", str(finished)]) == 0
    assert "not reported" not in capsys.readouterr().out


def test_status_and_list_of_what_was_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_experiment(tmp_path / "experiments")
    (tmp_path / "experiments" / "bad.yaml").write_text("name: bad\n")
    assert main(["status", str(path)]) == 0
    assert "nothing is stored yet" in capsys.readouterr().out
    assert main(["list", str(path.parent), "--json"]) == 0
    bad, good = json.loads(capsys.readouterr().out)
    assert "task: missing" in bad["error"]
    assert (good["experiment"], good["state"]) == ("small", "not started")
    assert main(["list", str(path.parent)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert not (tmp_path / "experiments" / ".magic").exists()


def test_list_gives_the_state(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(finished.parent), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["state"] == "trained, 3 of 3 queries walked"


def test_an_export_holds_every_score(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "scores.csv"
    assert main(["export", str(finished), "--format", "csv", "--output", str(output), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    with output.open(newline="") as file:
        rows = list(csv.reader(file))
    assert content == {"file": str(output), "format": "csv", "rows": len(rows) - 1}
    assert "csv" in refused(capsys, "export", finished, "--format", "csv", "--output", tmp_path / "nowhere" / "s.csv")


def stored(path: Path) -> dict[str, bytes]:
    """Everything in the store beside an experiment file."""
    root = path.parent / ".magic" / "store"
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def orphan(path: Path) -> str:
    """A blob of the trajectory that no manifest names, last written two days ago."""
    root = path.parent / ".magic" / "store"
    blob = next(root.rglob("trajectory/blobs/*")).with_name(f"e{1:08d}-{'0' * 32}.pt")
    blob.write_bytes(b"half a state")
    os.utime(blob, (time.time() - 48 * 3600,) * 2)
    return str(blob.relative_to(root))


def test_verify_finds_a_flipped_bit(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    blob = max((finished.parent / ".magic" / "store").rglob("trajectory/blobs/*"), key=lambda path: path.stat().st_size)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    assert main(["verify", str(finished)]) == 1
    assert "1 findings" in capsys.readouterr().out


def test_verify_tells_scripts_the_kind_the_object_and_what_it_costs(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = orphan(finished)
    assert main(["verify", str(finished), "--json"]) == 0  # nothing reads an orphan
    content = json.loads(capsys.readouterr().out)
    assert set(content) == {"experiment", "storage", "trainings", "findings", "in_use", "checked", "bytes"}
    assert content["experiment"] == "small"
    assert content["storage"] == str(finished.parent / ".magic" / "store")
    assert len(content["trainings"]) == 1
    [finding] = content["findings"]
    assert set(finding) == {"object", "kind", "problem", "consequence"}
    assert (finding["object"], finding["kind"]) == (left, "orphaned")
    (finished.parent / ".magic" / "store" / "small" / "notes.txt").write_text("mine")
    assert main(["verify", str(finished)]) == 1
    shown = capsys.readouterr()
    assert "small/notes.txt\n  foreign: " in shown.out
    assert shown.err == ""  # progress is for people at a terminal


def test_gc_lists_what_it_would_free_and_frees_it_when_asked(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", str(finished)]) == 0
    assert capsys.readouterr().out == "there is nothing to free\n"
    left = orphan(finished)
    before = stored(finished)
    assert main(["gc", str(finished)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("orphaned    1 objects of 12 bytes, training ")
    assert told[-1].endswith("nothing was freed; with --yes it would be")
    assert stored(finished) == before
    assert main(["gc", str(finished), "--older-than", "72", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == 0
    assert main(["gc", str(finished), "--yes", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content) == {"experiment", "storage", "done", "objects", "bytes", "freed", "kept", "in_use"}
    assert content["done"]
    orphaned, epochs = content["freed"]
    assert set(orphaned) == {"kind", "why", "training", "objects", "bytes", "paths"}
    assert (orphaned["kind"], orphaned["paths"], orphaned["bytes"]) == ("orphaned", [left], 12)
    assert epochs["kind"] == "epoch"
    assert content["objects"] == orphaned["objects"] + epochs["objects"]
    assert left not in stored(finished)
    assert main(["verify", str(finished)]) == 0


def test_delete_removes_the_experiment_and_a_run_brings_the_same_scores(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def exported(name: str) -> bytes:
        output = tmp_path / name
        assert main(["export", str(finished), "--format", "csv", "--output", str(output)]) == 0
        return output.read_bytes()

    scores, before = exported("before.csv"), stored(finished)
    capsys.readouterr()
    assert main(["delete", str(finished)]) == 0
    told = capsys.readouterr().out
    assert "Dagster's records: 6 assets, 3 partitions and 4 runs: with --yes they would be deleted too" in told
    assert "nothing was deleted; with --yes it would be" in told
    assert stored(finished) == before
    assert main(["delete", str(finished), "--yes", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content.pop("dagster") == {"assets": 6, "partitions": 3, "runs": 4}
    assert set(content) == {"experiment", "storage", "done", "objects", "bytes", "trainings", "stays", "in_use"}
    with open_instance(finished.parent) as instance:
        assert instance.get_runs() == []
        assert instance.get_dynamic_partitions("small_queries") == []
        assert records_of(instance, "small") == Records(0, 0, 0)
    [training] = content["trainings"]
    assert set(training) == {"fingerprint", "objects", "bytes", "written_unix"}
    assert (content["done"], content["objects"]) == (True, len(before))
    assert content["bytes"] == sum(map(len, before.values()))
    assert stored(finished) == {}
    assert main(["verify", str(finished)]) == 0
    assert main(["status", str(finished)]) == 0
    shown = capsys.readouterr()
    assert "nothing is stored yet" in shown.out
    assert shown.err == ""
    assert main(["delete", str(finished), "--yes"]) == 0
    told = capsys.readouterr().out
    assert "nothing of it is stored" in told and "0 assets, 0 partitions and 0 runs: deleted" in told
    assert main(["run", str(finished)]) == 0
    assert exported("after.csv") == scores
    capsys.readouterr()
    assert main(["status", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dagster"]["differences"] == []


def test_cleaning_up_needs_no_more_of_the_file_than_its_name_and_storage(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = finished.read_text()
    finished.write_text(text.replace("queries: {split: test, count: 3}", "queries: {file: lost.jsonl}"))
    assert "lost.jsonl" in refused(capsys, "status", finished)
    assert main(["verify", str(finished)]) == 0
    assert main(["gc", str(finished)]) == 0
    assert main(["delete", str(finished)]) == 0
    capsys.readouterr()
    # A mistake in what tells where the objects are is no small matter.
    finished.write_text(text + "storag: elsewhere\n")
    assert "did you mean storage?" in refused(capsys, "delete", finished)
    finished.write_text("storage: 3\n" + text)
    assert "storage" in refused(capsys, "gc", finished)


def test_wrong_arguments_of_gc_and_delete_are_one_line_and_code_2(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--older-than: expected a number of hours" in refused(capsys, "gc", finished, "--older-than", "-1")
    assert "--older-than: expected a number of hours" in refused(capsys, "gc", finished, "--older-than", "day")
    assert "no training begins with 'zz'" in refused(capsys, "delete", finished, "--fingerprint", "zz", "--yes")
    other = write_experiment(finished.parent, "other")
    other.write_text(other.read_text() + "storage_name: small\n")
    assert "keeps its results in the same folder" in refused(capsys, "delete", finished, "--yes")
    assert len(stored(finished)) > 0


def test_delete_is_refused_with_code_1_while_somebody_is_at_work(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [folder] = {path.rpartition("/trajectory/")[0] for path in stored(finished) if "/trajectory/" in path}
    chain = Chain(Store(str(finished.parent / ".magic" / "store")), f"{folder}/trajectory", writers=f"{folder}/writers")
    with chain.take():
        before = stored(finished)
        assert main(["delete", str(finished), "--yes"]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "nothing was deleted" in lines[0]
        assert f"held by process {os.getpid()}" in lines[0]
        assert stored(finished).keys() == before.keys()
        assert main(["gc", str(finished), "--yes"]) == 0
        assert f"held by process {os.getpid()}" in capsys.readouterr().out


def test_plan_says_what_a_run_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_experiment(tmp_path / "experiments")
    assert main(["plan", str(path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["steps"], content["segments"], content["queries"]) == (6, 3, 3)
    assert not (tmp_path / "experiments" / ".magic").exists()
