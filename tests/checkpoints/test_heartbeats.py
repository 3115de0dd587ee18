"""Who holds a lease and cannot be asked of the operating system is judged by the counter of its heartbeat alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from magic_pipeline.checkpoints import Chain, Holder, Store
from magic_pipeline.checkpoints import heartbeat as heartbeats
from magic_pipeline.errors import HeldError, LeaseLostError, StorageError

ROOT = Path(__file__).parents[2]
HOLDS = """
import sys
from magic_pipeline.checkpoints import Chain, Holder, Store
lease = Chain(Store(sys.argv[1]), sys.argv[2], writers="writers").take(Holder.this_process("child"))
print("holds", flush=True)
for line in sys.stdin:
    try:
        lease.check()
        print("still holds", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGIC_HEARTBEAT_SECONDS", "0.1")
    monkeypatch.setenv("MAGIC_EXPIRY_SECONDS", "1")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def chain(store: Store) -> Chain:
    return Chain(store, "q", writers="writers")


def held_elsewhere(chain: Chain) -> Holder:
    """The epoch of a process on another machine, whose heartbeat is `writers/elsewhere.json`."""
    holder = replace(Holder.this_process("far"), host="elsewhere", machine="m", pid=1, heartbeat="elsewhere")
    chain.store.create_json(chain.epoch_path(chain.highest_epoch() + 1), holder.as_json())
    return holder


def test_a_holder_elsewhere_that_gives_signs_of_life_is_left_alone(chain: Chain, store: Store) -> None:
    beating = heartbeats.Heartbeat(store, "writers", "elsewhere")
    beating.start()
    held_elsewhere(chain)
    began = time.monotonic()
    with pytest.raises(HeldError, match="run far, process 1 on elsewhere, which gives signs of life"):
        chain.take()
    assert time.monotonic() - began < 0.9
    beating.stop()
    assert store.list("writers") == []


def test_a_holder_elsewhere_whose_counter_stands_still_is_overtaken(
    chain: Chain, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.create_json("writers/elsewhere.json", {"beats": 7})
    held_elsewhere(chain)
    began = time.monotonic()
    with chain.take() as lease:
        assert lease.epoch == 2 and time.monotonic() - began >= 1
    assert "on elsewhere has given no sign of life for 1 s and is overtaken" in caplog.text


def test_a_holder_elsewhere_without_an_object_is_given_the_same_time(chain: Chain) -> None:
    held_elsewhere(chain)
    began = time.monotonic()
    with chain.take():
        assert time.monotonic() - began >= 1


def test_the_dead_process_of_many_chains_is_waited_for_once(store: Store) -> None:
    chains = [Chain(store, f"q{number}", writers="writers") for number in range(5)]
    for chain in chains:
        held_elsewhere(chain)
    began = time.monotonic()
    for chain in chains:
        chain.take().release()
    assert time.monotonic() - began < 2


def test_who_was_found_dead_and_beats_again_is_alive(store: Store) -> None:
    for number in range(2):
        held_elsewhere(Chain(store, f"q{number}", writers="writers"))
    Chain(store, "q0", writers="writers").take().release()
    beating = heartbeats.Heartbeat(store, "writers", "elsewhere")
    beating.start()
    with pytest.raises(HeldError):
        Chain(store, "q1", writers="writers").take()
    beating.stop()


def test_a_time_in_which_the_storage_was_away_counts_for_nobody(
    chain: Chain, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_json("writers/elsewhere.json", {"beats": 1})
    held_elsewhere(chain)
    read, reads = store.read_json, [0]

    def away(path: str) -> dict[str, object]:
        if path.startswith("writers"):
            reads[0] += 1
            if reads[0] == 3:
                time.sleep(1.5)  # longer than the expiry
                store.replace_json("writers/elsewhere.json", {"beats": 1})
        return read(path)

    monkeypatch.setattr(store, "read_json", away)
    began = time.monotonic()
    with chain.take():
        assert time.monotonic() - began >= 2.5


def test_leases_share_one_heartbeat_and_the_last_one_ends_it(store: Store) -> None:
    leases = [Chain(store, f"q{number}", writers="writers").take() for number in range(3)]
    assert len(store.list("writers")) == 1
    first = store.read_json(f"writers/{store.list('writers')[0]}")
    time.sleep(0.5)
    assert store.read_json(f"writers/{store.list('writers')[0]}")["beats"] > first["beats"] == 1
    leases[0].release()
    leases[1].release()
    assert len(store.list("writers")) == 1
    leases[2].release()
    assert store.list("writers") == []
    assert not [thread for thread in threading.enumerate() if thread.name == "magic-heartbeat" and _still(thread)]


def _still(thread: threading.Thread) -> bool:
    thread.join(2)
    return thread.is_alive()


def test_a_refused_take_leaves_no_heartbeat(chain: Chain, store: Store) -> None:
    beating = heartbeats.Heartbeat(store, "writers", "elsewhere")
    beating.start()
    held_elsewhere(chain)
    with pytest.raises(HeldError):
        chain.take()
    assert store.list("writers") == ["elsewhere.json"]
    beating.stop()


def test_a_heartbeat_outlives_storage_that_is_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Chain(store, "q", writers="writers").take()
    with monkeypatch.context() as away:
        away.setattr(store, "replace_json", _fail)
        time.sleep(0.4)
    name = store.list("writers")[0]
    before = store.read_json(f"writers/{name}")["beats"]
    time.sleep(0.5)
    assert store.read_json(f"writers/{name}")["beats"] > before
    lease.release()


def _fail(path: str, content: object) -> None:
    raise StorageError("away")


@pytest.fixture
def child(store: Store) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDS, store.url, "q"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def test_a_process_that_runs_on_this_machine_is_left_alone_at_once(child: subprocess.Popen[str], chain: Chain) -> None:
    began = time.monotonic()
    with pytest.raises(HeldError, match=f"run child, process {child.pid} on .*, which is running"):
        chain.take()
    assert time.monotonic() - began < 0.5


def test_a_killed_process_is_overtaken_at_once(child: subprocess.Popen[str], chain: Chain) -> None:
    child.kill()
    child.wait()
    began = time.monotonic()
    with chain.take() as lease:
        assert lease.epoch == 2 and time.monotonic() - began < 0.5


def test_a_halted_process_is_overtaken_after_the_expiry_and_finds_its_lease_lost(
    child: subprocess.Popen[str], chain: Chain
) -> None:
    assert child.stdin is not None and child.stdout is not None
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.2)
    with chain.take() as lease:
        assert lease.epoch == 2
        os.kill(child.pid, signal.SIGCONT)
        print("check", file=child.stdin, flush=True)
        assert child.stdout.readline() == f"{LeaseLostError.__name__}\n"
        lease.check()
