"""A full disk or quota: one error in seconds with the path and the bytes, nothing half-written, and a rerun goes on from there."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from magic_pipeline.attribution.observing import CheckpointSealed
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.checkpoints import store as store_module
from magic_pipeline.checkpoints.sinks import open_sink
from magic_pipeline.errors import StorageFullError
from tests.attribution.running import keys, open_small, run, same_bits, walked
from tests.faults.struck_sink import Operation, Operations, Strike, StruckSink


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(filler: Path) -> None:
    """Takes what room there is."""
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        filler.write_bytes(bytes(8 * 2**20))


def test_a_disk_that_fills_up_during_the_walk_ends_it_at_once_and_costs_a_segment(
    small_disk: Path, undisturbed: Callable[..., Tensor]
) -> None:
    opened, filler, full = open_small(small_disk), small_disk / "filler", [0.0]
    train(opened)

    def observe(event: object) -> None:
        if isinstance(event, CheckpointSealed) and not filler.exists():
            fill(filler)
            full[0] = time.monotonic()

    with pytest.raises(
        StorageFullError, match=rf"{small_disk}/store/.*: no space left after \d+ bytes of about \d+ .*; free space"
    ):
        run(opened, observe=observe)
    assert time.monotonic() - full[0] < 10
    assert not list(small_disk.rglob("*.partial"))
    filler.unlink()
    assert same_bits(run(open_small(small_disk)), undisturbed())
    for key in keys(opened):
        assert len(walked(opened, key)) - len(set(walked(opened, key))) <= 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_publication_that_finds_no_room_in_its_middle_leaves_nothing_and_is_made_by_the_rerun(
    tmp_path: Path, number: int, undisturbed: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(operation: Operation) -> None:
        raise OSError(number, os.strerror(number))

    refusals: list[str] = []
    for n in range(0, 200, 3 if number == errno.ENOSPC else 7):
        operations = Operations(Strike(n, "during"), refuse)
        with monkeypatch.context() as full:
            full.setattr(store_module, "open_sink", _opening(operations))
            opened = open_small(tmp_path / str(n))
            try:
                run(opened)
            except StorageFullError as error:
                refusals.append(str(error))
        if len(operations.made) <= n:
            break
        assert not list(tmp_path.rglob("*.partial"))
        again = open_small(tmp_path / str(n))
        assert same_bits(run(again), undisturbed()), f"operation {n}: {operations.made[n]}"
        assert [f for f in verify_experiment(again).findings if not f.problem.startswith("orphaned")] == []
    assert len(refusals) >= 5
    assert all(str(tmp_path) in refusal and "no space left after" in refusal for refusal in refusals)


def _opening(operations: Operations) -> Callable[..., Any]:
    return lambda *arguments, **settings: StruckSink(open_sink(*arguments, **settings), operations)
