"""Partitions by query and rank in a real instance: killed, canceled and backfilled from the UI, with gangs of real processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from magic_pipeline.attribution import ledger
from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.status import StoredExperiment, stored_status
from magic_pipeline.errors import GangError
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.failures import RETRIES
from magic_pipeline.orchestration.headless import execute_asset
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.operating import opened_once
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.processes import process_of
from tests.orchestration.small_experiment import (
    materializations,
    planned_partitions,
    red_partitions,
    write_experiment,
)
from tests.orchestration.test_interrupts import raised_by
from tests.orchestration.test_killed_runs import EXECUTE_AGAIN, start_run
from tests.ui.serving import ask, served

SEGMENT = 2  # steps
TERMINATE = "mutation ($id: String!) { terminateRun(runId: $id) { __typename } }"
STATUS = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
BACKFILL = """
mutation ($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message }
  }
}
"""
BACKFILL_STATUS = (
    "query ($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }"
)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Two ranks in two processes; four queries, one at a time; slow while there is a file of that name, which there is not."""
    path = write_experiment(tmp_path / "experiments", slow=True)
    content = path.read_text()
    for old, new in (
        ("examples: 12", "examples: 12, query_count: 4"),
        ("count: 3", "count: 4"),
        ("threads: 1", "threads: 1, query_batch: 1"),
    ):
        assert old in content
        content = content.replace(old, new)
    path.write_text(f"{content}ranks: 2\nprocesses: 2\n")
    return load_experiment(path)


@pytest.mark.timeout(600)
def test_killed_and_canceled_gangs_leave_what_is_finished_and_a_backfill_by_rank_does_the_rest_once(
    experiment: Experiment, tmp_path: Path
) -> None:
    segments = ExperimentAssets.of(experiment).segments
    train_in_this_process(experiment)
    (experiment.folder / "slow").write_text("0.3")
    killed = start_run(experiment)
    with open_instance(experiment.folder) as instance:
        wait_until(lambda: len(materializations(instance, segments)) == 2)
    gang = gang_of(killed.pid)
    killed.kill()
    killed.communicate(timeout=60)
    assert len(gang) == 2
    wait_until(lambda: not any(map(lives, gang)), 10)
    first, *others = (query.key for query in stored_status(experiment)[0].queries)
    second = others[0]
    assert reported(experiment) == {f"{first}|0", f"{first}|1"}

    with served(experiment.folder, tmp_path / "ui.log") as address:
        with open_instance(experiment.folder) as instance:
            parent = instance.get_runs(limit=1)[0].run_id
        again = ask(address, EXECUTE_AGAIN, {"parent": parent})["launchRunReexecution"]["run"]["runId"]
        wait_until(lambda: stored(experiment).queries[1].sealed >= 1)
        gang = gang_of(worker_of(experiment, again))
        assert ask(address, TERMINATE, {"id": again})["terminateRun"]["__typename"] == "TerminateRunSuccess"
        wait_until(lambda: ask(address, STATUS, {"id": again})["runOrError"]["status"] == "CANCELED")
        assert len(gang) == 2
        wait_until(lambda: not any(map(lives, gang)), 10)
        assert reported(experiment) == {f"{first}|0", f"{first}|1"}
        assert not stored(experiment).queries[1].complete

        (experiment.folder / "slow").unlink()
        missing = [f"{query}|{rank}" for query in others for rank in "01"]
        params = {"assetSelection": [{"path": list(segments.path)}], "partitionNames": missing}
        launched = ask(address, BACKFILL, {"params": params})["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        status: dict[str, Any] = {}

        def has_ended() -> bool:
            status.update(ask(address, BACKFILL_STATUS, {"id": launched["backfillId"]})["partitionBackfillOrError"])
            return status["status"] not in ("REQUESTED", "CANCELING")

        wait_until(has_ended)
        assert status["status"] == "COMPLETED_SUCCESS"

    with open_instance(experiment.folder) as instance:
        runs = instance.get_runs(filters=dg.RunsFilter(tags={"dagster/backfill": launched["backfillId"]}))
        planned = [planned_partitions(instance, segments, run.run_id) for run in runs]
        assert sorted(planned, key=sorted) == [{f"{query}|{rank}" for query in others} for rank in "01"]
        reports = Counter(partition for partition, _, _ in materializations(instance, segments))
        # The first query's once more by the run that was executed again: it had planned them.
        assert reports == {f"{query}|{rank}": 1 + (query == first) for query in (first, *others) for rank in "01"}
        # Both of the first query's by the run that was killed, and those of one rank by the first of the backfill's runs.
        assert sum(not again for _, _, again in materializations(instance, segments)) == 2 + 3
        assert red_partitions(instance, segments) == set()
    # The second query was disturbed twice, by the kill and by the cancel, and each costs a segment at most.
    begun, steps = steps_begun(experiment), opened_once(experiment).steps
    assert begun[second] <= steps + 2 * SEGMENT
    assert {begun[query] for query in (first, *others) if query != second} == {steps}


def test_a_lost_process_is_tried_again_by_dagster_and_not_for_ever() -> None:
    lost = GangError("process 1 of the gang was ended by SIGKILL")
    assert isinstance(raised_by(lost), dg.RetryRequested)
    assert isinstance(raised_by(lost, retry_number=RETRIES), dg.Failure)


def train_in_this_process(experiment: Experiment) -> None:
    assert experiment.path is not None
    content = experiment.path.read_text()
    experiment.path.write_text(content.replace("processes: 2", "processes: 1"))
    with open_instance(experiment.folder) as instance:
        repository = build_definitions(experiment.folder).get_repository_def()
        assert execute_asset(instance, repository, ExperimentAssets.of(experiment).trajectory).is_success
    experiment.path.write_text(content)


def wait_until(reached: Callable[[], bool], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until, "not reached in time"
        time.sleep(0.1)


def stored(experiment: Experiment) -> StoredExperiment:
    return stored_status(experiment)[0]


def reported(experiment: Experiment) -> set[str | None]:
    """The segment partitions that are materialized."""
    with open_instance(experiment.folder) as instance:
        return {partition for partition, _, _ in materializations(instance, ExperimentAssets.of(experiment).segments)}


def worker_of(experiment: Experiment, run_id: str) -> int:
    """The process that executes a run."""
    with open_instance(experiment.folder) as instance:
        run = instance.get_run_by_id(run_id)
    assert run is not None
    worker = process_of(run_id, run.tags)
    assert worker is not None
    return worker.pid


def gang_of(pid: int) -> list[psutil.Process]:
    """The processes of the gang that a process has started."""
    return [p for p in psutil.Process(pid).children() if "rank_process" in " ".join(p.cmdline())]


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def steps_begun(experiment: Experiment) -> Counter[str]:
    """How many backward steps of each query the ledger says were begun."""
    opened, begun = opened_once(experiment), Counter[str]()
    for entry in ledger.entries(opened.store, opened.layout):
        begun.update({key: stop - entry["start"] for key, stop in entry.get("queries", {}).items()})
    return begun
