"""Gangs of real processes: the bits of one process, and whatever happens to one of them, an end, a cause and no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from magic_pipeline.attribution import gang
from magic_pipeline.attribution.gang import processes_of, train_together, walk_together
from magic_pipeline.attribution.observing import CheckpointSealed, Event, QueryComplete, WalkProgress
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import read_scores
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.checkpoints.holder import Holder
from magic_pipeline.errors import GangError, HeldError, InputError, InterruptedWalkError, NonFiniteError
from tests.attribution.gang_tasks import FAIL, SLEEPERS
from tests.attribution.running import TASKS, keys, open_small, relative_error, run, same_bits, scores
from tests.attribution.test_units import opened_with

ROOT = Path(__file__).parents[2]
GANG_TASKS = "tests.attribution.gang_tasks"
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


def test_tokens_have_the_same_scores_in_two_processes(tmp_path: Path) -> None:
    found = []
    for processes in (1, 2):
        opened = opened_with(tmp_path / str(processes), "token", ranks=2, processes=processes)
        together(opened)
        found.append([read_scores(opened, key).tokens for key in keys(opened)])
    assert found[0] == found[1] and None not in found[0]


def test_a_process_without_rows_of_a_batch_takes_part_all_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "ranks": 2,
        "training": {"batch_size": 1, "epochs": 1},
        "attribution": {"chunk": "auto", "memory_budget": "1GiB", "query_batch": 2},
    }
    settings["task"] = {"type": f"{TASKS}:SmallTask", "query_ids": ["first", "second"]}
    expected = run(open_small(tmp_path / "alone", **settings, processes=1))
    found = together(open_small(tmp_path / "together", **settings, processes=2))
    assert relative_error(found, expected) < 1e-12  # the width of calls was measured, and may differ


def test_one_process_that_is_killed_ends_all_and_a_rerun_by_another_number_goes_on(
    tmp_path: Path, alone: Tensor
) -> None:
    opened = open_small(tmp_path, **RANKS, processes=2)
    train(open_small(tmp_path, **RANKS, processes=1))
    killed_at: list[float] = []

    def kill(event: Event) -> None:
        if isinstance(event, WalkProgress) and event.step == 3:
            children()[-1].send_signal(signal.SIGKILL)
            killed_at.append(time.monotonic())

    with pytest.raises(GangError, match=r"process [01] of the gang was ended by SIGKILL"):
        walk_together(opened, keys(opened), observe=kill)
    assert time.monotonic() - killed_at[0] < 10
    assert children() == []
    assert {query.step for query in query_statuses(opened)} <= {4, 2}
    one = open_small(tmp_path, **RANKS, processes=1)
    assert same_bits(run(one), alone)
    # The heartbeat of the process that was killed may be left: it takes space and is no fault.
    assert [f for f in verify_experiment(opened).findings if "/writers/" not in f.object] == []


def test_a_walk_of_one_process_goes_on_in_two_one_segment_back_where_a_blob_is_damaged(
    tmp_path: Path, alone: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    one = open_small(tmp_path, **RANKS, processes=1)
    train(one)
    steps = iter(range(100))
    with pytest.raises(InterruptedWalkError):
        walk_together(one, keys(one), should_stop=lambda: next(steps) == 7)
    before = [query.step for query in query_statuses(one)]
    damaged = damage_newest(one, "rank1")
    two = open_small(tmp_path, **RANKS, processes=2)
    seen: list[WalkProgress] = []

    def see(event: Event) -> None:
        seen.extend([event] if isinstance(event, WalkProgress) else [])

    with suppress(InterruptedWalkError):  # it may be done before it hears
        walk_together(two, keys(two), observe=see, should_stop=lambda: bool(seen))
    resumed = [seen[0].resumed_from[key] for key in keys(two)]
    assert resumed[1:] == before[1:] and resumed[0] is not None and before[0] is not None
    assert before[0] < resumed[0] <= before[0] + 2
    assert "process 0: " in caplog.text and f"{damaged}: expected digest" in caplog.text
    assert children() == []
    assert same_bits(together(two), alone)


def damage_newest(opened: OpenExperiment, part: str) -> str:
    """Flips a bit in this part of the first query's newest checkpoint; the blob's name."""
    chain = opened.query_chain(opened.queries[0])
    name = chain.manifest(chain.sealed()[0]).blobs[part].name
    blob = Path(opened.store.url) / chain.blobs / name
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(bytes(content))
    return name


def test_the_error_of_one_process_is_the_runs_error_by_its_class(tmp_path: Path) -> None:
    task = {"type": f"{TASKS}:OverflowingQuery"}
    train(open_small(tmp_path, task=task, ranks=2, processes=1))
    opened = open_small(tmp_path, task=task, ranks=2, processes=2)
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


def test_a_task_that_prints_leaves_threads_and_children_and_fails_blocks_nobody(
    tmp_path: Path, alone: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = {"type": f"{GANG_TASKS}:Unruly"}
    opened = open_small(tmp_path, **RANKS, processes=2, task=task)
    train_together(opened)

    def fail(event: Event) -> None:
        if isinstance(event, WalkProgress) and event.step == 4:
            FAIL.touch()
            time.sleep(3)  # so that both have complained before either is heard, process 0 of its lost connection

    with pytest.raises(ArithmeticError, match="example of process 1 is beyond me") as caught:
        walk_together(opened, keys(opened), observe=fail)
    assert "In process 1 of the gang:" in caught.value.__notes__[0] and "example_losses" in caught.value.__notes__[0]
    sleepers = [int(pid) for pid in SLEEPERS.read_text().split()]
    assert len(sleepers) == 4 and children() == []
    until = time.monotonic() + 5
    while (left := list(filter(lives, sleepers))) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []
    assert same_bits(run(open_small(tmp_path, **RANKS, processes=1, task=task)), alone)


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_collectives_wait_for_nobodys_disk(tmp_path: Path, alone: Tensor) -> None:
    settings = {"collective_timeout_minutes": 3 / 60}
    opened = open_small(tmp_path, **RANKS, processes=2, task={"type": f"{GANG_TASKS}:SlowDisk"}, attribution=settings)
    assert same_bits(together(opened), alone)


def test_who_is_asked_to_stop_while_processes_start_stops(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(InterruptedWalkError):
        train_together(open_small(tmp_path, **RANKS, processes=2), should_stop=lambda: True)
    assert time.monotonic() - began < 60 and children() == []


def test_nothing_is_started_for_what_is_finished_or_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (open_small(tmp_path, **RANKS, processes=count) for count in (1, 2))

    def start(*arguments: object) -> None:
        raise AssertionError("processes are started")

    monkeypatch.setattr(gang._Gang, "_start", start)
    with other_process() as other:
        with one.trajectory_chain.take(other), pytest.raises(HeldError, match=f"process {other.pid}"):
            train_together(two)
        train(one)
        assert train_together(two).resumed_from == two.steps
        with one.query_chain(one.queries[1]).take(other), pytest.raises(HeldError):
            walk_together(two, keys(two))
    with pytest.raises(AssertionError, match="processes are started"):
        walk_together(two, keys(two))
    run(one)
    assert walk_together(two, keys(two)).resumed_from == {}


@contextmanager
def other_process() -> Iterator[Holder]:
    """A process that lives within."""
    code = (
        "import json; from magic_pipeline.checkpoints.holder import Holder;"
        "print(json.dumps(Holder.this_process().as_json()), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield Holder.from_json(json.loads(process.stdout.readline()))
        process.communicate("\n")


def test_more_processes_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = open_small(tmp_path, ranks=4, processes=4).experiment
    monkeypatch.setattr(gang, "choose_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="processes: 4 processes need a GPU each, and this machine has 2"):
        processes_of(experiment)
    assert processes_of(experiment.model_copy(update={"processes": "auto"})) == 2


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
