"""Gangs of real processes: the bits of one process, and whatever happens to one of them, an end, a cause and no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from magic_pipeline.attribution.gang import processes_of, train_together, walk_together
from magic_pipeline.attribution.observing import CheckpointSealed, Event, QueryComplete, WalkProgress
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.errors import GangError, InterruptedWalkError, NonFiniteError
from tests.attribution.running import TASKS, keys, open_small, run, same_bits, scores

ROOT = Path(__file__).parents[2]
RANKS: dict[str, Any] = {"ranks": 2, "training": {"clip_norm": 0.3, "microbatch_size": 1}}


def together(opened: OpenExperiment, observe: Callable[[Event], None] = lambda event: None) -> Tensor:
    train_together(opened)
    walk_together(opened, keys(opened), observe=observe)
    return torch.stack([scores(opened, key) for key in keys(opened)], dim=1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """What one process gives."""
    return run(open_small(tmp_path_factory.mktemp("alone"), **RANKS, processes=1))


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "rank_process" in " ".join(p.cmdline())]


def test_two_processes_give_the_bits_of_one_and_say_what_they_do(tmp_path: Path, alone: Tensor) -> None:
    events: list[Event] = []
    opened = open_small(tmp_path, **RANKS, processes=2)
    assert same_bits(together(opened, events.append), alone)
    assert [e.step for e in events if isinstance(e, CheckpointSealed)] == [4, 4, 4, 2, 2, 2]
    assert [e.step for e in events if isinstance(e, WalkProgress)] == [5, 4, 3, 2, 1, 0]
    assert [e.key for e in events if isinstance(e, QueryComplete)] == keys(opened)
    assert verify_experiment(opened).findings == () and children() == []


def test_one_process_that_is_killed_ends_all_and_a_rerun_by_another_number_goes_on(
    tmp_path: Path, alone: Tensor
) -> None:
    opened = open_small(tmp_path, **RANKS, processes=2)
    train_together(opened)

    def kill(event: Event) -> None:
        if isinstance(event, WalkProgress) and event.step == 3:
            children()[-1].send_signal(signal.SIGKILL)

    with pytest.raises(GangError, match=r"process [01] of the gang was ended by SIGKILL"):
        walk_together(opened, keys(opened), observe=kill)
    assert children() == []
    assert {query.step for query in query_statuses(opened)} <= {4, 2}
    one = open_small(tmp_path, **RANKS, processes=1)
    assert same_bits(run(one), alone)
    assert verify_experiment(opened).findings == ()


def test_a_walk_begun_by_one_process_is_finished_by_two_after_a_request_to_stop(tmp_path: Path, alone: Tensor) -> None:
    one = open_small(tmp_path, **RANKS, processes=1)
    train_together(one)
    steps = iter(range(100))
    with pytest.raises(InterruptedWalkError):
        walk_together(one, keys(one), should_stop=lambda: next(steps) == 3)
    assert {query.step for query in query_statuses(one)} == {4}
    two = open_small(tmp_path, **RANKS, processes=2)
    seen: list[Event] = []

    def stop() -> bool:
        return any(isinstance(event, WalkProgress) for event in seen)

    with pytest.raises(InterruptedWalkError, match="a rerun goes on from there"):
        walk_together(two, keys(two), observe=seen.append, should_stop=stop)
    assert children() == []
    assert same_bits(together(two), alone)


def test_the_error_of_one_process_is_the_runs_error_by_its_class(tmp_path: Path) -> None:
    opened = open_small(tmp_path, task={"type": f"{TASKS}:OverflowingQuery"}, ranks=2, processes=2)
    train_together(opened)
    with pytest.raises(NonFiniteError, match=r"query 'first': .*at step"):
        walk_together(opened, keys(opened))
    assert [query.complete for query in query_statuses(opened)] == [False, True, True]
    assert children() == []


def test_processes_that_make_no_step_are_ended_and_their_stacks_kept(tmp_path: Path) -> None:
    settings = {"stall_timeout_minutes": 0.15}
    opened = open_small(tmp_path, **RANKS, processes=2, attribution=settings)
    train_together(open_small(tmp_path, **RANKS, processes=1))

    def halt(event: Event) -> None:
        if isinstance(event, WalkProgress) and event.step == 5:
            children()[-1].send_signal(signal.SIGSTOP)

    with pytest.raises(
        GangError, match=r"no process of the gang made a step for 0.15 minutes; all their stacks are in (.*)"
    ) as caught:
        walk_together(opened, keys(opened), observe=halt)
    logs = [log.read_text() for log in Path(str(caught.value).rpartition(" ")[2]).iterdir()]
    assert any("most recent call first" in log for log in logs)
    assert children() == []


PARENT = """
import sys
from pathlib import Path
from tests.attribution.test_gang import RANKS
from tests.attribution.running import keys, open_small
from magic_pipeline.attribution.gang import train_together
print("starts", flush=True)
train_together(open_small(Path(sys.argv[1]), **RANKS, processes=2))
"""


def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        watched = psutil.Process(parent.pid)
        until = time.monotonic() + 60
        while len(watched.children(recursive=True)) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        orphans = watched.children(recursive=True)
        assert len(orphans) == 2
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    _, alive = psutil.wait_procs(orphans, timeout=10)
    assert alive == []


def test_auto_takes_the_largest_divisor_that_the_machine_has_cpus_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    for ranks, expected in ((1, 1), (2, 2), (3, 3), (6, 3), (8, 4), (5, 1)):
        assert processes_of(open_small(tmp_path, ranks=ranks).experiment) == expected
