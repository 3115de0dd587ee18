"""Real processes, really killed: before, during and after every durable operation of a chain's life."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.checkpoints import Chain, Holder, Store, is_gone, tensors_digest
from magic_pipeline.errors import HeldError
from tests.checkpoints.killed_writer import FACTS, STEPS, state, work

ROOT = Path(__file__).parents[2]
LAST_BREATH = """
import sys, time
from magic_pipeline.checkpoints import Chain, Holder, Store
from magic_pipeline.errors import HeldError
sys.stdin.readline()
try:
    lease = Chain(Store(sys.argv[1]), "q").take(Holder.this_process(sys.argv[2]))
    print("took", lease.epoch, flush=True)
except HeldError as error:
    print("held by", error.holder["run_id"], flush=True)
sys.stdin.read()
"""


def acknowledged(place: Path) -> int:
    """The last step that the writer knew to be sealed; 0 when complete; one above all steps when there is none."""
    ledger = place / "ledger"
    return int(ledger.read_text().split()[-1]) if ledger.exists() else max(STEPS) + 1


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """In RAM where there is such a place: a SIGKILL loses nothing that was written, synced or not."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def test_wherever_a_writer_is_killed_the_newest_whole_checkpoint_is_found_and_the_work_goes_on(
    quick_folder: Path,
) -> None:
    program = [sys.executable, "-m", "tests.checkpoints.killed_writer", str(quick_folder)]
    output = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    killed: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    modes = [kill["mode"] for kill in killed]
    assert min(modes.count(mode) for mode in ("before", "during")) > 30
    found_partial = 0
    for kill in killed:
        place = Path(kill["place"])
        found_partial += check_survivors(place)
        finish_and_check(place)
    assert found_partial > 20, "the kills left too little behind for this test to mean something"


def check_survivors(place: Path) -> bool:
    """Whatever is visible is whole, and no acknowledged step is lost. Says whether the kill left anything behind."""
    chain, sealed = Chain(Store(str(place / "store")), "q"), acknowledged(place)
    findings = chain.audit()
    assert {finding.kind for finding in findings} <= {"orphaned"}, (place.name, findings)
    if (completed := chain.completed(FACTS)) is not None:
        assert tensors_digest(completed.tensors("scores")) == tensors_digest(state(0)), place.name
        return bool(findings)
    newest = chain.newest(FACTS, order="lowest")
    assert sealed > 0, f"{place.name}: the completion is lost"
    assert (newest.step if newest else max(STEPS) + 1) in (sealed, sealed - 1), place.name
    if newest is not None:
        assert tensors_digest(newest.tensors("rank0")) == tensors_digest(state(newest.step)), place.name
        assert tensors_digest(newest.tensors("rank1")) == tensors_digest(state(newest.step + 100)), place.name
    return bool(findings)


def finish_and_check(place: Path) -> None:
    """The next writer takes over at once, loses nothing, and leaves nothing behind but the completion."""
    store = Store(str(place / "store"))
    before = acknowledged(place)
    work(store, place / "ledger")
    steps = [int(line) for line in (place / "ledger").read_text().split()]
    assert len(steps) == len(set(steps)), f"{place.name}: sealed again: {steps}, killed at {before}"
    chain = Chain(store, "q")
    completed = chain.completed(FACTS)
    assert completed is not None and chain.audit() == [] and chain.sealed() == [], place.name
    left = [path.name for path in (place / "store").rglob("*") if path.is_file() and "epochs" not in path.parts]
    assert sorted(left) == sorted([Path(completed.path).name, completed.blobs["scores"].name]), place.name


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], store: Path, run: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", LAST_BREATH, str(store), run]
    process = subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started.append(process)
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_of_racing_processes_exactly_one_takes_the_lease(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    racers = [start(started, tmp_path, f"run-{index}") for index in range(4)]
    time.sleep(0.5)  # all have imported and wait
    for racer in racers:
        go(racer)
    answers = [answer(racer) for racer in racers]
    assert answers.count("took 1") == 1
    winner = answers.index("took 1")
    assert answers.count(f"held by run-{winner}") == 3


def test_a_killed_holder_is_replaced_at_once_and_a_living_one_is_not(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    chain = Chain(Store(str(tmp_path)), "q")
    holder = start(started, tmp_path, "run-1")
    go(holder)
    assert answer(holder) == "took 1"
    with pytest.raises(HeldError, match=r"held by run run-1.*which is running"):
        chain.take()
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(HeldError):
        chain.take()
    holder.kill()
    # A wait without reaping: it is a zombie from here on, as a killed worker is whose parent is busy.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    begin = time.monotonic()
    assert chain.take().epoch == 2
    assert time.monotonic() - begin < 1


def test_who_is_gone_is_told_only_where_it_can_be_seen() -> None:
    here = Holder.this_process("run")

    def other(**changes: object) -> Holder:
        return Holder(**{**here.as_json(), **changes})

    assert is_gone(here) is False
    assert is_gone(other(pid=2**22 + 1)) is True
    assert is_gone(other(started="ticks:1")) is True  # the pid was given to another process
    assert is_gone(other(host="another")) is None
    assert is_gone(other(machine="another")) is None
    assert is_gone(other(pid_namespace="pid:[1]", pid=2**22 + 1)) is None  # another container on this kernel
    assert is_gone(other(boot_id="before")) is (True if here.machine else None)
    assert Holder.from_json(here.as_json()) == here
