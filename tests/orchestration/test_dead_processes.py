"""Which runs are called dead: only those whose process is provably gone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.launcher import WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG
from dagster._core.utils import make_new_run_id

from magic_pipeline.orchestration.headless import mark_dead_runs
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.launcher import HealthCheckedRunLauncher
from magic_pipeline.orchestration.processes import PROCESS_TAG, process_of, process_tags


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with open_instance(tmp_path_factory.mktemp("dead processes")) as opened:
        yield opened


@pytest.fixture(scope="module")
def gone() -> dict[str, object]:
    """A process of this machine that has ended, as JSON."""
    code = "import json; from magic_pipeline.checkpoints.holder import Holder; print(json.dumps(Holder.this_process().as_json()))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(shown.stdout)
    return found


def tags_of(gone: dict[str, object], run_id: str) -> dict[str, str]:
    return {PROCESS_TAG: json.dumps(gone | {"run_id": run_id})}


def add_run(
    instance: dg.DagsterInstance, run_id: str, tags: dict[str, str], status: dg.DagsterRunStatus
) -> dg.DagsterRun:
    return instance.add_run(dg.DagsterRun("job", run_id=run_id, tags=tags, status=status))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_dead_runs_are_ended_and_live_or_unknown_ones_left_alone(
    instance: dg.DagsterInstance, gone: dict[str, object]
) -> None:
    started, canceling, fresh, live, unknown, elsewhere, inherited = (make_new_run_id() for _ in range(7))
    unfinished = dg.DagsterRunStatus.STARTED
    add_run(instance, started, tags_of(gone, started), unfinished)
    add_run(instance, canceling, tags_of(gone, canceling), dg.DagsterRunStatus.CANCELING)
    add_run(instance, fresh, tags_of(gone, fresh), dg.DagsterRunStatus.NOT_STARTED)
    add_run(instance, live, process_tags(live), unfinished)
    add_run(instance, unknown, {}, unfinished)
    add_run(instance, elsewhere, tags_of(gone | {"host": "another", "machine": "m"}, elsewhere), unfinished)
    # Executed again in the UI: the tag of its parent, whose process is gone, says nothing about it.
    add_run(instance, inherited, tags_of(gone, started), unfinished)
    assert set(mark_dead_runs(instance)) == {started, canceling, fresh}
    statuses = {run.run_id: run.status for run in instance.get_runs()}
    assert statuses[started] == statuses[fresh] == dg.DagsterRunStatus.FAILURE
    assert statuses[canceling] == dg.DagsterRunStatus.CANCELED
    assert {statuses[run_id] for run_id in (live, unknown, elsewhere, inherited)} == {unfinished}
    assert mark_dead_runs(instance) == []


def test_the_launcher_calls_a_worker_failed_only_when_it_is_provably_gone(
    instance: dg.DagsterInstance, gone: dict[str, object]
) -> None:
    launcher = instance.run_launcher
    assert isinstance(launcher, HealthCheckedRunLauncher)
    assert launcher.supports_check_run_worker_health
    unreachable = {GRPC_INFO_TAG: json.dumps({"host": "127.0.0.1", "port": free_port()})}

    def health(tags: dict[str, str], run_id: str) -> WorkerStatus:
        run = add_run(instance, run_id, tags, dg.DagsterRunStatus.STARTED)
        return launcher.check_run_worker_health(run).status

    ids = [make_new_run_id() for _ in range(7)]
    assert health(tags_of(gone, ids[0]), ids[0]) == WorkerStatus.FAILED
    # A live worker survives its code server.
    assert health(process_tags(ids[1]) | unreachable, ids[1]) == WorkerStatus.RUNNING
    assert health(tags_of(gone, ids[0]) | unreachable, ids[2]) == WorkerStatus.FAILED
    assert health(tags_of(gone, ids[0]), ids[3]) == WorkerStatus.RUNNING
    assert health({}, ids[4]) == WorkerStatus.RUNNING
    # A retry needs the code server: one at a fixed port is waited for, one at a socket is gone for good.
    assert health(tags_of(gone, ids[5]) | unreachable, ids[5]) == WorkerStatus.RUNNING
    at_a_socket = {GRPC_INFO_TAG: json.dumps({"host": "localhost", "socket": "/nowhere/socket"})}
    assert health(tags_of(gone, ids[6]) | at_a_socket, ids[6]) == WorkerStatus.FAILED


def test_a_tag_that_cannot_be_read_says_nothing() -> None:
    for value in ("", "[]", "{}", '{"run_id": "r"}', '{"run_id": 3, "pid": "x"}'):
        assert process_of("r", {PROCESS_TAG: value}) is None


def test_a_home_of_our_own_is_configured_and_another_ones_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_instance(tmp_path) as opened:
        assert opened.root_directory == str(tmp_path / ".magic" / "dagster")
        assert opened.event_log_storage.get_pool_config().default_pool_limit == 1
        assert opened.run_monitoring_enabled
        assert opened.run_retries_enabled
        assert not opened.telemetry_enabled
    other = tmp_path / "other"
    other.mkdir()
    (other / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(other))
    with open_instance(tmp_path) as opened:
        assert opened.root_directory == str(other)
        assert not isinstance(opened.run_launcher, HealthCheckedRunLauncher)
