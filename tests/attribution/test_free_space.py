"""Room in the storage is asked for before work begins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from magic_pipeline.checkpoints.local_sink import LocalSink
from magic_pipeline.errors import StorageFullError
from tests.attribution.running import keys, open_small, run


class Usage(NamedTuple):
    free: int


def test_training_and_walks_that_do_not_fit_are_refused_before_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_small(tmp_path)
    seen: list[object] = []
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: Usage(300_000))
        with pytest.raises(
            StorageFullError, match=r"store: training \(4 states.*\) takes \d+ bytes .* and 300000 .* are free"
        ):
            train(opened, observe=seen.append)
        assert seen == [] and opened.trajectory_chain.sealed() == []
    train(opened)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: Usage(300_000))
        with pytest.raises(StorageFullError, match=r"the walk of 3 queries takes"):
            walk(opened, keys(opened), observe=seen.append)
        assert seen == []
    run(opened)


def test_the_free_space_is_that_of_the_disk_also_before_the_folder_is_there(tmp_path: Path) -> None:
    free = LocalSink(tmp_path / "not" / "there").free_bytes()
    assert free is not None and abs(free - shutil.disk_usage(tmp_path).free) < 2**30
