"""gc frees what nobody needs, and nothing else: on every storage, killed anywhere, beside live processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from magic_pipeline.attribution.collecting import Collection, collect
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import write_score_matrix
from magic_pipeline.attribution.status import matrix_digest, query_statuses
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.checkpoints import Chain, SealedName, Store
from magic_pipeline.errors import InterruptedWalkError
from tests.attribution.clutter import (
    TENSORS,
    clutter,
    ended_process,
    in_a_bare_process,
    killed_at_deletion,
    leave_blob,
    leave_heartbeat,
    leave_unfinished,
    tree,
    writer_at_work,
)
from tests.attribution.running import keys, open_small, run, same_bits, stop_after

Undisturbed = Callable[..., Tensor]


def finished(folder: Path, **changes: Any) -> OpenExperiment:
    opened = open_small(folder, **changes)
    run(opened)
    write_score_matrix(opened)
    return opened


@pytest.fixture(scope="module")
def _cluttered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluttered")
    clutter(finished(folder), folder)
    return folder


@pytest.fixture
def cluttered(_cluttered: Path, tmp_path: Path) -> Path:
    """The folder of a finished experiment with what dead writers leave behind."""
    return Path(shutil.copytree(_cluttered, tmp_path / "cluttered"))


def freed(found: Collection, kind: str) -> set[str]:
    """The paths that go for reasons of this kind."""
    return {path for one in found.freed if one.kind == kind for path in one.paths}


def age(opened: OpenExperiment, path: str, hours: float) -> None:
    """As if an object on a local disk had been written so long ago."""
    then = time.time() - hours * 3600
    os.utime(Path(opened.store.url) / path, (then, then))


def half_walked(folder: Path) -> OpenExperiment:
    """The first query is sealed at steps 4 and 3."""
    opened = open_small(folder, attribution={"save_every": 1})
    with pytest.raises(InterruptedWalkError, match="step 3"):
        walk(opened, keys(opened)[:1], should_stop=stop_after(4))
    return opened


def flip(opened: OpenExperiment, chain: Chain, name: SealedName) -> str:
    """Flips a bit of a checkpoint's blob. The manifest's path."""
    blob = Path(opened.store.url) / chain.blobs / chain.manifest(name).blobs["rank0"].name
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    return chain.path(name)


def test_clutter_goes_and_nothing_else_on_every_storage(
    tmp_path: Path, any_storage: dict[str, Any], undisturbed: Undisturbed
) -> None:
    opened = finished(tmp_path, **any_storage)
    assert collect(opened.experiment, older_than=0, free=True).freed == ()
    clean = tree(opened)
    clutter(opened, tmp_path)
    before = tree(opened)
    forecast = collect(opened.experiment, older_than=0)
    assert tree(opened) == before
    done = collect(opened.experiment, older_than=0, free=True)
    assert done.freed == forecast.freed
    kinds = {"leftover", "superseded", "orphaned", "epoch", "heartbeat"}
    with_unfinished = not opened.store.url.startswith("memory:")
    assert {one.kind for one in done.freed} == kinds | ({"unfinished"} if with_unfinished else set())
    gone = [f"{path} (unfinished)" if one.kind == "unfinished" else path for one in done.freed for path in one.paths]
    assert done.bytes == sum(before[path] for path in gone)
    assert not set(tree(opened)) & {path for one in done.freed for path in one.paths}
    # Nothing that was there before the clutter is gone, but for what a newer one of the same content has replaced.
    replaced = freed(done, "superseded") | freed(done, "epoch")
    assert set(clean) - set(tree(opened)) <= replaced
    assert verify_experiment(opened).findings == ()
    assert collect(opened.experiment, older_than=0).freed == ()
    assert same_bits(run(opened), undisturbed())


class KilledError(BaseException):
    """Stands for a kill between two deletions, where the process that is killed would be this one."""


def test_ended_before_any_deletion_it_loses_nothing_and_goes_on(
    cluttered: Path, tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, delete, deletions = query_statuses(open_small(cluttered)), Store.delete, itertools.count()

    def ended(store: Store, path: str) -> None:
        if "/writers/" not in path and next(deletions) == stop:  # a heartbeat ends with its process
            raise KilledError
        delete(store, path)

    for stop in itertools.count():
        opened = open_small(Path(shutil.copytree(cluttered, tmp_path / str(stop))))
        deletions = itertools.count()
        with monkeypatch.context() as patch, contextlib.suppress(KilledError):
            patch.setattr(Store, "delete", ended)
            collect(opened.experiment, older_than=0, free=True)
        assert query_statuses(opened) == before
        collect(opened.experiment, older_than=0, free=True)
        assert verify_experiment(opened).findings == ()
        assert collect(opened.experiment, older_than=0).freed == ()
        if next(deletions) <= stop:
            break
        shutil.rmtree(tmp_path / str(stop))
    assert stop >= 15
    assert same_bits(run(opened), undisturbed())


@pytest.mark.parametrize("n", [0, 7, 15])
def test_killed_before_a_deletion_it_loses_nothing_and_goes_on(cluttered: Path, n: int) -> None:
    opened = open_small(cluttered)
    before = query_statuses(opened)
    assert killed_at_deletion(n, "gc", "--yes", "--older-than", "0", cluttered / "small.yaml") is None
    assert query_statuses(opened) == before
    collect(opened.experiment, older_than=0, free=True)
    assert query_statuses(opened) == before
    assert verify_experiment(opened).findings == ()
    assert collect(opened.experiment, older_than=0).freed == ()


def test_what_nothing_names_is_left_alone_until_it_is_old(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    dead = dataclasses.replace(ended_process(), host="elsewhere")  # whether it lives, only its silence tells
    blob = leave_blob(opened.trajectory_chain, ended_process())
    beat = leave_heartbeat(opened, dead)
    leave_unfinished(opened, f"{opened.layout.ledger}/{0:020d}-00000000.json")
    [partial] = (trained_folder / "store" / opened.layout.ledger).glob(".*")
    for path in (blob, beat, f"{opened.layout.ledger}/{partial.name}"):
        age(opened, path, hours=23)
    assert not {one.kind for one in collect(opened.experiment).freed} & {"orphaned", "heartbeat", "unfinished"}
    assert {one.kind for one in collect(opened.experiment, older_than=22 * 3600).freed} >= {"orphaned", "heartbeat"}
    for path in (blob, beat, f"{opened.layout.ledger}/{partial.name}"):
        age(opened, path, hours=25)
    found = collect(opened.experiment, free=True)
    assert freed(found, "orphaned") == {blob}
    assert freed(found, "heartbeat") == {beat}
    assert not partial.exists()
    assert verify_experiment(opened).findings == ()


@pytest.mark.parametrize("what", ["trajectory", "query"])
def test_what_a_live_process_holds_is_left_alone_and_named(trained_folder: Path, what: str) -> None:
    opened = open_small(trained_folder)
    held = opened.trajectory_chain if what == "trajectory" else opened.query_chain(opened.queries[0])
    chain = held.folder
    with writer_at_work(held) as (process, blob):
        age(opened, blob, hours=1000)
        for free in (False, True):
            found = collect(opened.experiment, older_than=0, free=free)
            assert [used.folder for used in found.in_use] == [chain]
            assert f"process {process.pid}" in found.in_use[0].who
            assert not any(path.startswith(chain) for one in found.freed for path in one.paths)
            assert found.freed == ()
        process.send_signal(signal.SIGSTOP)  # halted is not dead
        assert [used.folder for used in collect(opened.experiment, older_than=0, free=True).in_use] == [chain]
        process.kill()
        process.wait()
        done = collect(opened.experiment, older_than=0, free=True)
        assert freed(done, "orphaned") == {blob}
        assert len(freed(done, "heartbeat")) == 1
    assert verify_experiment(opened).findings == ()


def test_an_older_epoch_whose_holder_lives_keeps_its_blobs(trained_folder: Path) -> None:
    """A process that was overtaken and wakes up again may still be about to seal: nothing is taken from under its hands."""
    opened = open_small(trained_folder)
    chain = opened.query_chain(opened.queries[0])
    with writer_at_work(chain) as (process, blob):
        opened.store.create_json(chain.epoch_path(2), {"not": "a holder"})
        opened.store.create_json(chain.released_path(2), {})
        other = leave_blob(chain, ended_process())
        found = collect(opened.experiment, older_than=0, free=True)
        assert freed(found, "orphaned") == {other}
        process.kill()
        process.wait()
    assert freed(collect(opened.experiment, older_than=0, free=True), "orphaned") == {blob}


def test_an_unfinished_walk_keeps_its_two_newest_checkpoints_and_goes_on_from_them(trained_folder: Path) -> None:
    opened = half_walked(trained_folder)
    chain = opened.query_chain(opened.queries[0])
    three, four = chain.sealed()
    assert (three.step, four.step) == (3, 4)
    facts = chain.manifest(three).facts
    # A later process's: the second newest again, one before, and a damaged one before that.
    with chain.take() as lease:
        again = lease.seal(4, {"rank0": chain.verified(four).tensors("rank0")}, facts)
        before = lease.seal(5, {"rank0": TENSORS}, facts)
        damaged = flip(opened, chain, SealedName(6, lease.seal(6, {"rank0": TENSORS}, facts).epoch))
    found = collect(opened.experiment, older_than=0, free=True)
    assert {chain.path(four), before.path, damaged} <= freed(found, "superseded")
    assert chain.sealed() == [three, SealedName(4, again.epoch)]
    assert verify_experiment(opened).findings == ()
    assert walk(opened, keys(opened)[:1]).resumed_from == {opened.queries[0].key: 3}


def test_a_damaged_checkpoint_goes_only_if_a_newer_whole_one_is_there(trained_folder: Path) -> None:
    opened = half_walked(trained_folder)
    chain = opened.query_chain(opened.queries[0])
    three, four = chain.sealed()
    newest = chain.path(three)
    content = (Path(opened.store.url) / newest).read_bytes()
    (Path(opened.store.url) / newest).write_bytes(b"")
    assert collect(opened.experiment, older_than=0, free=True).freed == ()
    (Path(opened.store.url) / newest).write_bytes(content)
    damaged = flip(opened, chain, four)
    assert damaged in freed(collect(opened.experiment, older_than=0, free=True), "damaged")
    assert verify_experiment(opened).findings == ()
    assert walk(opened, keys(opened)[:1]).resumed_from == {opened.queries[0].key: 3}


def test_a_damaged_state_goes_and_the_next_walk_makes_it_again(trained_folder: Path, undisturbed: Undisturbed) -> None:
    opened = open_small(trained_folder)
    chain = opened.trajectory_chain
    damaged = flip(opened, chain, next(name for name in chain.sealed() if name.step == 2))
    assert damaged in freed(collect(opened.experiment, older_than=0, free=True), "damaged")
    assert verify_experiment(opened).findings == ()
    assert same_bits(run(opened), undisturbed())
    assert [name.step for name in chain.sealed()] == [0, 2, 4, 6]


def test_damaged_epochs_plans_and_ledger_entries_go(tmp_path: Path, undisturbed: Undisturbed) -> None:
    opened = finished(tmp_path)
    root = tmp_path / "store"
    victims = [
        next(root.rglob("trajectory/epochs/00000001.json")),
        next(root.rglob("queries/*/*/plans/*.json")),
        next(root.rglob("ledger/*.json")),
    ]
    for victim in victims:
        victim.write_bytes(b"")
    assert len(verify_experiment(opened).findings) == 3
    found = collect(opened.experiment, free=True)
    assert {str(victim.relative_to(root)) for victim in victims} <= {path for one in found.freed for path in one.paths}
    assert verify_experiment(opened).findings == ()
    assert same_bits(run(opened), undisturbed())


def test_a_damaged_sheet_goes_when_a_whole_copy_is_there_and_stays_when_not(tmp_path: Path) -> None:
    opened = finished(tmp_path)
    folder = tmp_path / "store" / opened.layout.scores
    manifest = next((folder / "manifests").glob(f"{keys(opened)[0]}.*"))
    manifest.write_bytes(b"")
    matrix = next((folder / "matrix" / "blobs").iterdir())
    matrix.write_bytes(b"")
    assert freed(collect(opened.experiment, older_than=0), "damaged") == set()
    digests = [query.scores_digest for query in query_statuses(opened)]
    assert digests[0] is None
    run(opened)
    write_score_matrix(opened)
    done = collect(opened.experiment, older_than=0, free=True)
    assert {
        f"{opened.layout.scores}/manifests/{manifest.name}",
        f"{opened.layout.matrix}/blobs/{matrix.name}",
    } <= freed(done, "damaged")
    assert None not in [query.scores_digest for query in query_statuses(opened)]
    assert matrix_digest(opened) is not None
    assert verify_experiment(opened).findings == ()


def test_what_another_schema_wrote_is_kept_with_its_blobs(tmp_path: Path) -> None:
    opened = finished(tmp_path)
    chain = opened.query_chain(opened.queries[0])
    with chain.take() as lease:
        blob = opened.store.write_blob(chain.blobs, TENSORS, prefix=f"e{lease.epoch:08d}-")
        path = chain.path(SealedName(2, lease.epoch))
        opened.store.create_json(path, {"schema": 2, "parts": [blob.name]})
    found = collect(opened.experiment, older_than=0, free=True)
    assert freed(found, "leftover") | freed(found, "orphaned") == set()
    assert opened.store.exists(path)
    assert opened.store.exists(f"{chain.blobs}/{blob.name}")
    assert [finding.kind for finding in verify_experiment(opened).findings] == ["foreign"]


def test_trainings_with_older_settings_are_kept_and_named_and_cleaned_all_the_same(tmp_path: Path) -> None:
    older = finished(tmp_path, training={"seed": 1})
    orphan = leave_blob(older.trajectory_chain, ended_process())
    opened = finished(tmp_path)
    found = collect(opened.experiment, older_than=0, free=True)
    assert freed(found, "orphaned") == {orphan}
    [kept] = [one for one in found.kept if one.what == "another training"]
    assert kept.training == older.fingerprint
    left = {path: size for path, size in tree(opened).items() if path.startswith(f"{older.folder}/")}
    cleaned = sum(path.startswith(f"{older.layout.trajectory}/epochs/") for path in left)  # gc's own epoch
    assert cleaned == 2
    assert kept.objects == len(left) - cleaned
    assert kept.bytes < sum(left.values())
    assert f"--fingerprint {older.fingerprint[:12]}" in kept.why
    assert verify_experiment(opened).trainings == (opened.fingerprint, older.fingerprint)
    assert verify_experiment(opened).findings == ()
    assert [query.complete for query in query_statuses(older)] == [True] * 3


def test_the_walk_of_a_query_that_is_no_longer_asked_is_kept_and_named(tmp_path: Path) -> None:
    task = {"type": "linear_regression", "examples": 12, "features": 2}
    opened = finished(tmp_path, task=task, queries={"split": "test", "count": 2})
    fewer = finished(tmp_path, task=task, queries={"split": "test", "count": 1})
    assert fewer.fingerprint == opened.fingerprint
    found = collect(fewer.experiment, older_than=0, free=True)
    [kept] = found.kept
    assert opened.queries[1].key in kept.what
    assert found.freed[0].kind == "superseded"  # the matrix of both
    assert kept.bytes > 0
    assert [query.complete for query in query_statuses(opened)] == [True, True]


def test_neither_torch_nor_the_task_is_needed(cluttered: Path) -> None:
    (cluttered / "small.yaml").write_text(
        (cluttered / "small.yaml").read_text().replace("tests.attribution.small_task", "gone.with_the_wind")
    )
    code = """
import sys
from magic_pipeline import cli
assert cli.main(["gc", sys.argv[1], "--yes", "--older-than", "0"]) == 0
assert cli.main(["verify", sys.argv[1]]) == 0
print("torch" in sys.modules)
"""
    assert in_a_bare_process(code, cluttered / "small.yaml").splitlines()[-1] == "False"
