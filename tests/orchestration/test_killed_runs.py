"""A run interrupted, a run held by another, a run killed, and that run executed again from the UI: real processes throughout."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.status import StoredExperiment, stored_status
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.progress import LOST_TAG, RESUMED_TAG
from tests.orchestration.small_experiment import materializations, red_partitions, write_experiment
from tests.ui.serving import ask, served

RUNS = "{ runsOrError { ... on Runs { results { runId status } } } }"
EXECUTE_AGAIN = """
mutation ($parent: String!) {
  launchRunReexecution(reexecutionParams: {parentRunId: $parent, strategy: ALL_STEPS}) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
  }
}
"""


@pytest.mark.timeout(240)
def test_an_interrupted_then_killed_run_is_finished_by_executing_it_again_in_the_ui(tmp_path: Path) -> None:
    experiment = load_experiment(write_experiment(tmp_path / "experiments", slow=True))
    slow = experiment.folder / "slow"
    slow.touch()

    interrupted = start_run(experiment)
    wait_for(interrupted, experiment, lambda stored: stored.trajectory.sealed >= 1)
    interrupted.send_signal(signal.SIGTERM)
    _, complaint = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 1, complaint
    assert complaint.splitlines()[-1].startswith("magic-pipeline: ")
    assert "Traceback" not in complaint
    assert run_statuses(experiment) == [("training_trajectory", dg.DagsterRunStatus.FAILURE)]
    assert not stored_status(experiment)[0].trajectory.complete

    killed = start_run(experiment)
    wait_for(killed, experiment, lambda stored: any(query.sealed >= 1 for query in stored.queries))
    killed.send_signal(signal.SIGSTOP)  # alive, and not finished before the second one has looked
    second = command(experiment, "run", "--json")
    assert second.returncode == 0, second.stderr
    assert {holder["pid"] for holder in json.loads(second.stdout)["held"].values()} == {killed.pid}
    assert f"process {killed.pid}" in second.stderr
    killed.kill()
    killed.communicate(timeout=60)
    assert run_statuses(experiment)[0] == ("segment_checkpoints", dg.DagsterRunStatus.STARTED)
    slow.unlink()

    with served(experiment.folder, tmp_path / "ui.log") as address:
        runs = ask(address, RUNS)["runsOrError"]["results"]
        assert {run["status"] for run in runs} == {"FAILURE", "SUCCESS"}
        launched = ask(address, EXECUTE_AGAIN, {"parent": runs[0]["runId"]})["launchRunReexecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        again = launched["run"]["runId"]
        wait_until_succeeded(address, again)

    assets = ExperimentAssets.of(experiment)
    with open_instance(experiment.folder) as instance:
        reports = materializations(instance, assets.segments)
        assert len({partition for partition, _, _ in reports}) == len(reports) == 3
        assert red_partitions(instance, assets.segments) == set()
        # The second training went on from the first one's, and the last walk from the killed one's.
        training = next(
            run for run in instance.get_runs() if run.asset_selection == {assets.trajectory} and run.is_success
        )
        assert re.fullmatch(r"training from step \d", training.tags[RESUMED_TAG])
        walk = instance.get_run_by_id(again)
        assert walk is not None
        assert re.fullmatch(r"3 queries from steps? .*", walk.tags[RESUMED_TAG])
        assert re.fullmatch(r"nothing|at most [12] steps?", walk.tags[LOST_TAG])


@pytest.mark.timeout(120)
def test_a_run_that_hangs_is_ended_with_its_stacks_shown_and_the_next_one_goes_on(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "experiments", slow=True)
    path.write_text(path.read_text().replace("threads: 1", "threads: 1, stall_timeout_minutes: 0.05"))
    experiment = load_experiment(path)
    slow = path.parent / "slow"
    slow.write_text("0.02")
    hung = start_run(experiment)
    wait_for(hung, experiment, lambda stored: stored.trajectory.sealed >= 1)
    slow.write_text("1000")
    _, complaint = hung.communicate(timeout=60)
    assert hung.returncode == 1
    assert "Timeout (0:00:03)!" in complaint and "in example_losses" in complaint
    slow.unlink()
    finished = command(experiment, "run", "--json")
    assert finished.returncode == 0, finished.stderr
    assert len(json.loads(finished.stdout)["marked_as_failed"]) == 1


def start_run(experiment: Experiment) -> subprocess.Popen[str]:
    """`magic-pipeline run` as a shell starts it in the background: with SIGINT ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "magic_pipeline.cli", "run", str(experiment.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509 - it starts no thread and takes no lock
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )


def command(experiment: Experiment, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "magic_pipeline.cli", name, str(experiment.path), *options]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)


def wait_for(
    process: subprocess.Popen[str], experiment: Experiment, reached: Callable[[StoredExperiment], bool]
) -> None:
    """Wait until the store says so, while the process lives."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode} before: {process.communicate()[1]}")
        stored = stored_status(experiment)
        if stored and reached(stored[0]):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"not reached in time: {stored_status(experiment)}")


def run_statuses(experiment: Experiment) -> list[tuple[str, dg.DagsterRunStatus]]:
    """(asset, status) of every run, newest first."""
    with open_instance(experiment.folder) as instance:
        return [(key.path[-1], run.status) for run in instance.get_runs() for key in run.asset_selection or ()]


def wait_until_succeeded(address: str, run_id: str) -> None:
    query = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
    deadline, run = time.monotonic() + 120, dict[str, Any]()
    while time.monotonic() < deadline:
        run = ask(address, query, {"id": run_id})["runOrError"]
        if run["status"] in ("SUCCESS", "FAILURE", "CANCELED"):
            break
        time.sleep(0.5)
    assert run["status"] == "SUCCESS", run
