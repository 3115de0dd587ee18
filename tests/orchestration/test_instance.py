"""The instance of a folder: made once, whoever comes first, and nobody else's configuration is touched."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

from magic_pipeline.orchestration.instance import dagster_home, open_instance, prepare_home


def _open(folder: Path, together: Barrier) -> None:
    together.wait(60)
    with open_instance(folder) as instance:
        instance.get_runs_count()


def test_processes_that_open_a_new_instance_at_once_all_get_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    together = context.Barrier(3)
    processes = [context.Process(target=_open, args=(tmp_path, together)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_a_home_left_by_a_killed_process_is_configured_and_anybody_elses_is_kept(tmp_path: Path) -> None:
    ours, theirs = dagster_home(tmp_path / "ours"), dagster_home(tmp_path / "theirs")
    for home, left in ((ours, "half.tmp"), (theirs, "storage")):
        home.mkdir(parents=True)
        (home / left).touch()
        prepare_home(home)
    assert "HealthCheckedRunLauncher" in (ours / "dagster.yaml").read_text()
    assert not (theirs / "dagster.yaml").exists()
