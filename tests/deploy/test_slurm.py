"""The batch script, as Slurm calls it: a block of queries, SIGTERM before the end, and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.status import StoredExperiment, stored_status
from tests.orchestration.small_experiment import write_experiment

JOB = Path(__file__).parents[2] / "deploy" / "slurm" / "job.sh"


def submit(path: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    scripts = Path(sys.executable).parent
    paths = os.pathsep.join([str(scripts), os.environ["PATH"]])
    environment = os.environ | {"PATH": paths, "TMPDIR": str(path.parent.parent), "SLURM_JOB_ID": "7"} | variables
    return subprocess.Popen(
        ["bash", str(JOB), str(path), *arguments],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(path: Path, reached: Callable[[StoredExperiment], bool]) -> None:
    until = time.monotonic() + 120
    while not any(reached(one) for one in stored_status(load_experiment(path))):
        assert time.monotonic() < until, "not reached in time"
        time.sleep(0.1)


def test_a_job_that_is_told_to_stop_ends_with_75_and_goes_on_when_it_is_queued_again(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "experiments", slow=True)
    (path.parent / "slow").touch()
    with submit(path) as job:
        wait_for(path, lambda stored: any(query.sealed for query in stored.queries))
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 75, output
    [stored] = stored_status(load_experiment(path))
    assert stored.trajectory.complete and not all(query.complete for query in stored.queries)
    (path.parent / "slow").unlink()
    with submit(path) as again:
        output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert all(query.scores_digest for query in stored_status(load_experiment(path))[0].queries)


def test_the_tasks_of_an_array_share_the_queries(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "experiments")
    queries = tmp_path / "queries.jsonl"
    queries.write_text("".join(f"{json.dumps({'id': f'query-{n}'})}\n\n" for n in range(3)))
    walked = []
    for task in range(4):
        variables = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "4"}
        with submit(path, str(queries), **variables) as job:
            output, _ = job.communicate(timeout=120)
        assert job.returncode == 0, output
        walked.append([query.id for query in stored_status(load_experiment(path))[0].queries if query.complete])
    assert walked == [
        ["query-0"],
        ["query-0", "query-1"],
        [f"query-{n}" for n in range(3)],
        [f"query-{n}" for n in range(3)],
    ]
    assert "fewer queries than tasks" in output


def test_a_wrong_experiment_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("name: wrong\n")
    with submit(tmp_path / "wrong.yaml") as job:
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 2 and "wrong.yaml" in output
