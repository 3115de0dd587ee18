"""delete removes an experiment's objects and nothing else, refuses while somebody is at work, and may be killed anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from magic_pipeline.attribution.deleting import delete
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import write_score_matrix
from magic_pipeline.attribution.status import stored_status
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.checkpoints import Store
from magic_pipeline.errors import InputError, MagicError
from tests.attribution.clutter import (
    clutter,
    ended_process,
    in_a_bare_process,
    killed_at_deletion,
    tree,
    writer_at_work,
)
from tests.attribution.running import open_small, run, same_bits

Undisturbed = Callable[..., Tensor]


@pytest.fixture(scope="module")
def _cluttered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deleted")
    opened = open_small(folder)
    run(opened)
    write_score_matrix(opened)
    clutter(opened, folder)
    return folder


@pytest.fixture
def cluttered(_cluttered: Path, tmp_path: Path) -> Path:
    """The folder of a finished experiment with what dead writers leave behind."""
    return Path(shutil.copytree(_cluttered, tmp_path / "cluttered"))


def other_files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "store" / "small").rglob("*") if path.is_file()}


def test_all_of_it_goes_and_a_run_makes_it_again_on_every_storage(
    tmp_path: Path, any_storage: dict[str, Any], undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_small(tmp_path, **any_storage)
    neighbour = open_small(tmp_path / "neighbour", name="small_too", **any_storage)
    neighbour.store.create_json(f"{neighbour.folder}/experiment.json", {"steps": 1, "created_unix": 0.0})
    run(opened)
    write_score_matrix(opened)
    clutter(opened, tmp_path)
    before = tree(opened)
    looked = delete(opened.experiment)
    assert tree(opened) == before
    assert (looked.done, looked.in_use, looked.stays) == (False, (), ())
    finished = {path: size for path, size in before.items() if "(unfinished)" not in path}
    assert (looked.objects, looked.bytes) == (len(finished), sum(finished.values()))
    done = delete(opened.experiment, really=True)
    assert done.trainings == looked.trainings
    assert tree(opened) == {}
    assert verify_experiment(opened).findings == ()
    caplog.clear()
    assert stored_status(opened.experiment) == ()
    assert caplog.records == []
    if Path(opened.store.url).is_dir():
        assert not Path(opened.store.url, "small").exists()
    assert len(tree(neighbour)) == 1
    assert delete(opened.experiment, really=True).trainings == ()
    assert same_bits(run(opened), undisturbed())


def test_names_that_are_not_ours_stay_and_are_told(cluttered: Path) -> None:
    opened = open_small(cluttered)
    notes = [
        cluttered / "store" / "small" / "notes.txt",
        cluttered / "store" / opened.layout.trajectory / "blobs" / "my.pt",
    ]
    for note in notes:
        note.write_text("mine")
    found = delete(opened.experiment, really=True)
    assert set(found.stays) == {str(note.relative_to(cluttered / "store")) for note in notes}
    assert all(note.read_text() == "mine" for note in notes)
    assert other_files(cluttered) == {"notes.txt", "my.pt"}


def test_one_training_of_several(tmp_path: Path) -> None:
    older, opened = open_small(tmp_path, training={"seed": 1}), open_small(tmp_path)
    run(older)
    run(opened)
    before = {path for path in tree(opened) if opened.fingerprint in path}
    with pytest.raises(InputError, match=r"--fingerprint: no training begins with 'xyz'; .* there are: \w{12}, \w{12}"):
        delete(opened.experiment, fingerprint="xyz")
    with pytest.raises(InputError, match="no training begins with ''"):
        delete(opened.experiment, fingerprint="", really=True)
    found = delete(opened.experiment, fingerprint=older.fingerprint[:8], really=True)
    assert [one.fingerprint for one in found.trainings] == [older.fingerprint]
    assert set(tree(opened)) == before
    assert opened.store.list("small") == [opened.fingerprint]


def test_a_prefix_of_several_is_refused(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    for fingerprint in ("ab" + "0" * 62, "ab" + "1" * 62):
        opened.store.create_json(f"small/{fingerprint}/experiment.json", {"steps": 1})
    with pytest.raises(InputError, match="2 trainings begin with 'ab'"):
        delete(opened.experiment, fingerprint="ab", really=True)
    assert len(tree(opened)) == 2


@pytest.mark.parametrize("halted", [False, True])
def test_it_is_refused_while_a_live_process_holds_anything(cluttered: Path, halted: bool) -> None:
    opened = open_small(cluttered)
    chain = opened.query_chain(opened.queries[2])
    with writer_at_work(chain) as (process, _):
        if halted:
            process.send_signal(signal.SIGSTOP)
        before = tree(opened)
        looked = delete(opened.experiment)
        assert [used.folder for used in looked.in_use] == [chain.folder]
        with pytest.raises(MagicError, match=f"nothing was deleted: .*{chain.folder} is held by process {process.pid}"):
            delete(opened.experiment, really=True)
        assert set(tree(opened)) == set(before)
        process.kill()
        process.wait()
        delete(opened.experiment, really=True)
    assert tree(opened) == {}


def test_a_holder_elsewhere_is_watched_and_deleted_when_it_is_silent(
    cluttered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGIC_HEARTBEAT_SECONDS", "0.1")
    monkeypatch.setenv("MAGIC_EXPIRY_SECONDS", "0.5")
    opened = open_small(cluttered)
    chain = opened.query_chain(opened.queries[2])
    elsewhere = dataclasses.replace(ended_process(), host="elsewhere")
    chain.store.create_json(chain.epoch_path(chain.highest_epoch() + 1), elsewhere.as_json())
    assert len(delete(opened.experiment).in_use) == 1
    delete(opened.experiment, really=True)
    assert tree(opened) == {}


class EndedError(BaseException):
    """Stands for a kill between two deletions, where the process that is killed would be this one."""


def half_deleted(opened: OpenExperiment, stop: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether it was ended before deletion number `stop`, or got through."""
    remove, deletions = Store.delete, itertools.count()

    def ended(store: Store, path: str) -> None:
        # Heartbeats and epochs end with their process, and this one goes on: for those see the test with a real kill.
        if "/writers/" not in path and "/epochs/" not in path and next(deletions) == stop:
            raise EndedError
        remove(store, path)

    with monkeypatch.context() as patch, contextlib.suppress(EndedError):
        patch.setattr(Store, "delete", ended)
        delete(opened.experiment, really=True)
        return False
    return True


def test_ended_before_any_deletion_it_leaves_nothing_half_and_goes_on(
    cluttered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stop in itertools.count(0, 2):  # every second one, for each costs half a second
        opened = open_small(Path(shutil.copytree(cluttered, tmp_path / str(stop))))
        if not half_deleted(opened, stop, monkeypatch):
            break
        # What is left is whole or not there; blobs without a manifest take space and are no harm.
        assert {finding.kind for finding in verify_experiment(opened).findings} <= {"orphaned"}
        delete(opened.experiment, really=True)
        assert tree(opened) == {}
        shutil.rmtree(tmp_path / str(stop))
    assert stop > 40


@pytest.mark.parametrize("stop", [3, 12, 25, 45])
def test_a_run_after_half_a_deletion_gives_the_same_bits(
    cluttered: Path, stop: int, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_small(cluttered)
    assert half_deleted(opened, stop, monkeypatch)
    assert same_bits(run(opened), undisturbed())


def test_killed_before_a_deletion_it_goes_on(cluttered: Path, tmp_path: Path) -> None:
    """The last deletions are those of the epochs."""
    copied = shutil.copytree(cluttered, tmp_path / "counted")
    count = killed_at_deletion(10**6, "delete", "--yes", copied / "small.yaml")
    assert count is not None
    for n in (1, count // 2, *range(count - 7, count, 2)):
        opened = open_small(Path(shutil.copytree(cluttered, tmp_path / str(n))))
        assert killed_at_deletion(n, "delete", "--yes", tmp_path / str(n) / "small.yaml") is None
        epochs = [path for path in tree(opened) if "/epochs/" in path]
        # Nothing calls an epoch released that somebody will take.
        assert all(path.replace(".released", "") in epochs for path in epochs)
        delete(opened.experiment, really=True)
        assert tree(opened) == {}


def test_neither_torch_nor_the_task_is_needed(cluttered: Path) -> None:
    path = cluttered / "small.yaml"
    path.write_text(path.read_text().replace("tests.attribution.small_task", "gone.with_the_wind"))
    code = """
import sys
from magic_pipeline import cli
assert cli.main(["delete", sys.argv[1]]) == 0
assert cli.main(["delete", sys.argv[1], "--yes"]) == 0
print("torch" in sys.modules)
"""
    assert in_a_bare_process(code, path).splitlines()[-1] == "False"
    assert not (cluttered / "store" / "small").exists()
