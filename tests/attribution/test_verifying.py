"""verify tells damaged, orphaned and foreign objects apart, in all trainings, beside live processes, without the task."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.attribution.collecting import collect
from magic_pipeline.attribution.deleting import delete
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.inventory import date_text, inventory_of, role_of
from magic_pipeline.attribution.validation import retrain_subsets, write_lds
from magic_pipeline.attribution.verifying import Finding, verify_experiment, verify_stored
from magic_pipeline.checkpoints import Chain, SealedName
from tests.attribution.clutter import (
    TENSORS,
    ended_process,
    leave_blob,
    leave_heartbeat,
    leave_unfinished,
    tree,
    writer_at_work,
)
from tests.attribution.running import open_small, run


def put(root: Path, path: str) -> str:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("not ours")
    return path


def of_kind(findings: tuple[Finding, ...], kind: str) -> set[str]:
    assert all(finding.problem.startswith(f"{finding.kind}: ") and finding.consequence for finding in findings)
    return {finding.object for finding in findings if finding.kind == kind}


def test_all_trainings_are_verified_with_the_files_own_first(tmp_path: Path) -> None:
    older = open_small(tmp_path, training={"seed": 1})
    run(older)
    opened = open_small(tmp_path)
    run(opened)
    last = open_small(tmp_path, training={"seed": 2})
    run(last)
    again = open_small(tmp_path)
    found = verify_experiment(again)
    assert found.trainings == (opened.fingerprint, last.fingerprint, older.fingerprint)
    assert verify_stored(again.experiment) == found
    victim = Path(older.store.url) / next(
        path for path in tree(older) if f"{older.fingerprint}/trajectory/blobs" in path
    )
    victim.write_bytes(b"")
    assert len(of_kind(verify_experiment(again).findings, "damaged")) == 1


def test_names_that_nothing_of_ours_writes_are_foreign(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    run(opened)
    root, query = Path(opened.store.url), opened.query_chain(opened.queries[0])
    strangers = {
        put(root, path)
        for path in (
            "small/notes.txt",
            "small/old/trajectory/manifests/00000000.e00000001.json",
            f"{opened.folder}/README.md",
            f"{opened.layout.trajectory}/manifests/00000002.json",
            f"{opened.layout.trajectory}/blobs/model.pt",
            f"{query.folder}/complete.json",
            f"{query.epochs}/1.json",
            f"{opened.layout.scores}/manifests/scores.json",
            f"{opened.layout.scores}/blobs/scores.csv",
            f"{opened.layout.ledger}/today.json",
        )
    }
    findings = verify_experiment(opened).findings
    assert of_kind(findings, "foreign") == strangers
    assert len(findings) == len(strangers)


def test_the_names_of_all_that_is_written_are_known(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    run(opened)
    lease = opened.query_chain(opened.queries[0]).take()
    roles = [role_of(path.removeprefix(f"{opened.folder}/")) for path in tree(opened)]
    assert None not in roles
    assert set(roles) == {"manifest", "blob", "plan", "ledger", "queries", "description", "heartbeat", "epoch"}
    lease.release()


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("validation/0123456789abcdef0123456789abcdef/bank.json", "description"),
        ("validation/0123456789abcdef0123456789abcdef/plans/00000000.json", "plan"),
        ("validation/0123456789abcdef0123456789abcdef/blocks/000000-0008/complete.e00000001.json", "manifest"),
        ("validation/0123456789abcdef0123456789abcdef/later/000008-0008/epochs/00000001.released.json", "epoch"),
        ("validation/0123456789abcdef0123456789abcdef/reports/blobs/0123456789abcdef0123456789abcdef.parquet", "blob"),
        ("validation/elsewhere/bank.json", None),
        ("trajectory/plans", None),
        ("queries/a-00000000/manifests/00000000.e00000001.json", None),
    ],
)
def test_a_role_is_told_by_the_name(path: str, role: str | None) -> None:
    assert role_of(path) == role


def test_the_validations_retrainings_are_read_and_cleaned_and_deleted_too(tmp_path: Path) -> None:
    opened = open_small(tmp_path, validation={"lds": {"subsets": 4, "drop_fraction": 0.25}})
    run(opened)
    retrain_subsets(opened)
    write_lds(opened)
    found = verify_experiment(opened)
    assert found.findings == ()
    assert collect(opened.experiment, older_than=0).freed == ()
    blocks = [path for path in tree(opened) if "/blocks/" in path and "/blobs/" in path]
    assert blocks
    chain = Chain(opened.store, blocks[0].rpartition("/blobs/")[0], writers=opened.layout.writers)
    orphan = leave_blob(chain, ended_process())
    assert of_kind(verify_experiment(opened).findings, "orphaned") == {orphan}
    collect(opened.experiment, older_than=0, free=True)
    assert verify_experiment(opened).findings == ()
    (Path(opened.store.url) / blocks[0]).write_bytes(b"")
    assert of_kind(verify_experiment(opened).findings, "damaged") == {blocks[0]}
    delete(opened.experiment, really=True)
    assert tree(opened) == {}


def test_checkpoints_of_other_work_and_of_another_schema_are_foreign(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    run(opened)
    first, second = (opened.query_chain(query) for query in opened.queries[:2])
    root = Path(opened.store.url)
    [end] = second.completions()
    shutil.copy(root / second.path(end), root / first.path(SealedName(-1, 7)))
    with opened.trajectory_chain.take() as lease:
        facts = opened.trajectory_chain.manifest(opened.trajectory_chain.sealed()[0]).facts
        other_state = lease.seal(2, {"rank0": TENSORS}, facts).path
        schema = opened.trajectory_chain.path(SealedName(3, lease.epoch))
        opened.store.create_json(schema, {"schema": 2})
    findings = verify_experiment(opened).findings
    assert of_kind(findings, "foreign") == {other_state, schema}
    # Its name says epoch 7, and its content another one: that is a manifest in the wrong place.
    assert of_kind(findings, "damaged") == {first.path(SealedName(-1, 7))}


def test_a_score_manifest_that_lacks_something_is_damaged_and_said_to_be_none(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    run(opened)
    name = opened.store.list(f"{opened.layout.scores}/manifests")[0]
    path = f"{opened.layout.scores}/manifests/{name}"
    content = opened.store.read_json(path)
    opened.store.replace_json(path, {field: value for field, value in content.items() if field != "facts"})
    [finding] = verify_experiment(opened).findings
    assert (finding.object, finding.kind) == (path, "damaged")
    assert finding.problem == "damaged: it is no manifest of ours: KeyError('facts')"


def test_what_a_dead_process_left_is_orphaned_and_what_a_live_one_writes_is_not(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    chain = opened.query_chain(opened.queries[0])
    with writer_at_work(chain) as (process, blob):
        leave_unfinished(opened, f"{chain.blobs}/e{1:08d}-{'0' * 32}.pt")
        found = verify_experiment(opened)
        assert found.findings == ()
        [used] = found.in_use
        assert used.folder == chain.folder
        assert used.holder["pid"] == process.pid
        assert f"in use by process {process.pid}" in "\n".join(found.lines())
        process.kill()
        process.wait()
        found = verify_experiment(opened)
    assert found.in_use == ()
    orphans = of_kind(found.findings, "orphaned")
    assert len(orphans) == len(found.findings) == 3  # the blob, the unfinished one, the heartbeat
    assert {blob, f"{chain.blobs}/e{1:08d}-{'0' * 32}.pt"} < orphans


def test_an_older_writers_orphan_is_told_also_while_another_one_works(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    chain = opened.query_chain(opened.queries[0])
    orphan = leave_blob(chain, ended_process())
    with writer_at_work(chain):
        assert of_kind(verify_experiment(opened).findings, "orphaned") == {orphan}


def test_what_is_removed_while_it_is_read_is_no_damage(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer retires old checkpoints while verify is at it: between the listing, the manifest and the blob."""
    opened = open_small(trained_folder)
    chain = opened.query_chain(opened.queries[0])
    with chain.take() as lease:
        facts = {"training": opened.fingerprint, "query": opened.queries[0].digest}
        sealed = [lease.seal(step, {"rank0": TENSORS}, facts) for step in (5, 4, 3)]
    manifest, store, looks = Chain.manifest, opened.store, list[int]()

    def retired_meanwhile(self: Chain, name: SealedName) -> Any:
        found = manifest(self, name)
        looks.append(name.step)
        if looks.count(5) == 2 and store.exists(sealed[0].path):  # the second look is the audit's
            store.delete(sealed[0].path)
            store.delete(f"{chain.blobs}/{sealed[0].blobs['rank0'].name}")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "manifest", retired_meanwhile)
        findings = verify_experiment(opened).findings
    assert of_kind(findings, "damaged") == set()
    # What really is missing is still told.
    store.delete(f"{chain.blobs}/{sealed[1].blobs['rank0'].name}")
    assert len(of_kind(verify_experiment(opened).findings, "damaged")) == 1


def test_heartbeats_are_judged_by_their_process(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    beat = leave_heartbeat(opened, ended_process())
    assert of_kind(verify_experiment(opened).findings, "orphaned") == {beat}
    opened.store.delete(beat)
    leave_heartbeat(opened, dataclasses.replace(ended_process(), host="elsewhere"))
    assert verify_experiment(opened).findings == ()
    (Path(opened.store.url) / beat).write_bytes(b"")
    assert of_kind(verify_experiment(opened).findings, "damaged") == {beat}


def test_each_folder_is_named_before_it_is_read(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    told: list[str] = []
    verify_experiment(opened, tell=told.append)
    assert told == [opened.folder, opened.layout.trajectory]


def test_an_inventory_tells_sizes_and_dates(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    run(opened)
    [training] = inventory_of(load_experiment(tmp_path / "small.yaml")).trainings
    assert training.bytes == sum(tree(opened).values())
    assert training.current
    assert date_text(training.written).endswith("UTC")
    assert not inventory_of(open_small(tmp_path, training={"epochs": 3}).experiment).trainings[0].current
