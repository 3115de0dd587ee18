"""Every sealed object damaged in turn, in four ways: a warning names it, the scores keep their last bit, it is sealed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import write_score_matrix, write_scores
from magic_pipeline.attribution.status import query_statuses, stored_status, trajectory_status
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.checkpoints import Chain, SealedName
from magic_pipeline.errors import InterruptedWalkError, TrajectoryMismatchError
from tests.attribution.running import keys, open_small, run, same_bits, scores, stop_after

Undisturbed = Callable[..., Tensor]
Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    """Flips one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def manifest(chain: Chain, name: SealedName) -> Path:
    return Path(chain.store.url) / chain.path(name)


def blob(chain: Chain, name: SealedName) -> Path:
    stored = chain.manifest(name).blobs["rank0"]
    return Path(chain.store.url) / chain.blobs / stored.name


four_ways = pytest.mark.parametrize(
    ("part", "damage"), [(blob, flip), (blob, truncate), (blob, remove), (manifest, empty)]
)
in_place = pytest.mark.parametrize("damage", [flip, empty])


def named(caplog: pytest.LogCaptureFixture, path: Path) -> bool:
    return any(str(path) in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def half_walked(folder: Path) -> OpenExperiment:
    """All queries are sealed at steps 4 and 2."""
    opened = open_small(folder)
    with pytest.raises(InterruptedWalkError, match="step 2"):
        walk(opened, keys(opened), should_stop=stop_after(5))
    return opened


@four_ways
def test_a_damaged_newest_checkpoint_of_a_query_costs_one_segment(
    trained_folder: Path,
    undisturbed: Undisturbed,
    caplog: pytest.LogCaptureFixture,
    part: Callable[[Chain, SealedName], Path],
    damage: Damage,
) -> None:
    opened = half_walked(trained_folder)
    first, *others = opened.queries
    victim = part(opened.query_chain(first), opened.query_chain(first).sealed()[0])
    damage(victim)
    report = walk(opened, keys(opened))
    assert report.resumed_from == {first.key: 4} | {query.key: 2 for query in others}
    assert named(caplog, victim)
    assert same_bits(run(opened), undisturbed())


def test_when_both_generations_are_damaged_the_query_starts_again(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    opened = half_walked(trained_folder)
    chain = opened.query_chain(opened.queries[0])
    victims = [blob(chain, name) for name in chain.sealed()]
    for victim in victims:
        flip(victim)
    assert walk(opened, keys(opened)).resumed_from[keys(opened)[0]] is None
    assert all(named(caplog, victim) for victim in victims)
    assert same_bits(run(opened), undisturbed())


@pytest.mark.parametrize(
    ("step", "part", "damage"),
    [(0, blob, flip), (2, blob, truncate), (2, manifest, empty), (4, manifest, flip), (6, blob, remove)],
)
def test_a_damaged_state_of_the_trajectory_is_computed_again(
    trained_folder: Path,
    undisturbed: Undisturbed,
    caplog: pytest.LogCaptureFixture,
    step: int,
    part: Callable[[Chain, SealedName], Path],
    damage: Damage,
) -> None:
    opened = open_small(trained_folder)
    chain = opened.trajectory_chain
    name = next(name for name in chain.sealed() if name.step == step)
    victim = part(chain, name)
    damage(victim)
    assert same_bits(run(opened), undisturbed())
    assert named(caplog, victim)


@four_ways
def test_training_goes_on_from_the_state_before_a_damaged_one(
    tmp_path: Path,
    trained_folder: Path,
    caplog: pytest.LogCaptureFixture,
    part: Callable[[Chain, SealedName], Path],
    damage: Damage,
) -> None:
    opened = open_small(tmp_path)
    with pytest.raises(InterruptedWalkError):
        train(opened, should_stop=stop_after(5))
    chain = opened.trajectory_chain
    newest = chain.sealed()[-1]
    assert newest.step == 5
    victim = part(chain, newest)
    damage(victim)
    trajectory = train(opened)
    assert (trajectory.resumed_from, trajectory.digest) == (4, train(open_small(trained_folder)).digest)
    assert named(caplog, victim)


@in_place
def test_a_damaged_end_of_training_is_sealed_again_without_training(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    opened = open_small(trained_folder)
    chain = opened.trajectory_chain
    victim = manifest(chain, chain.completions()[0])
    damage(victim)
    assert not trajectory_status(opened).complete
    assert named(caplog, victim)
    assert train(opened).resumed_from == 6
    assert trajectory_status(opened).complete
    assert same_bits(run(opened), undisturbed())


@four_ways
def test_a_damaged_finished_walk_is_walked_again(
    trained_folder: Path,
    undisturbed: Undisturbed,
    caplog: pytest.LogCaptureFixture,
    part: Callable[[Chain, SealedName], Path],
    damage: Damage,
) -> None:
    opened = open_small(trained_folder)
    walk(opened, keys(opened))
    before = [query.walk_digest for query in query_statuses(opened)]
    chain = opened.query_chain(opened.queries[1])
    victim = part(chain, chain.completions()[0])
    damage(victim)
    assert [query.complete for query in query_statuses(opened)] == [True, False, True]
    assert named(caplog, victim)
    assert list(walk(opened, keys(opened)).resumed_from) == [keys(opened)[1]]
    assert [query.walk_digest for query in query_statuses(opened)] == before
    assert same_bits(run(opened), undisturbed())
    findings = verify_experiment(opened).findings
    assert [finding for finding in findings if "queries/" in finding.object] == []


@in_place
def test_a_damaged_plan_is_taken_from_its_cohort(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened), should_stop=stop_after(0))
    first = opened.queries[0]
    folder = trained_folder / "store" / opened.layout.plans(first.key, first.digest)
    [victim] = folder.iterdir()
    damage(victim)
    walk(opened, keys(opened))
    assert named(caplog, victim)
    assert same_bits(run(opened), undisturbed())
    assert len(list(folder.iterdir())) == 2


@in_place
def test_a_damaged_ledger_entry_is_named_and_stops_nobody(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    opened = half_walked(trained_folder)
    victim = max((trained_folder / "store" / opened.layout.ledger).iterdir())
    damage(victim)
    assert same_bits(run(opened), undisturbed())
    assert named(caplog, victim)


def test_a_damaged_plan_costs_nothing_once_a_checkpoint_holds_it(
    trained_folder: Path, undisturbed: Undisturbed
) -> None:
    opened = half_walked(trained_folder)
    for query in opened.queries:
        for plan in (trained_folder / "store" / opened.layout.plans(query.key, query.digest)).iterdir():
            empty(plan)
    opened = open_small(trained_folder, attribution={"chunk": 3, "save_every": 1})
    assert same_bits(run(opened), undisturbed())


@in_place
@pytest.mark.parametrize("name", ["experiment.json", "queries.json"])
def test_a_damaged_description_is_named_and_written_again(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture, name: str, damage: Damage
) -> None:
    opened = open_small(trained_folder)
    victim = trained_folder / "store" / opened.folder / name
    damage(victim)
    assert same_bits(run(opened), undisturbed())
    assert named(caplog, victim)
    [stored] = stored_status(opened.experiment)
    assert [query.id for query in stored.queries] == ["first", "second", "third"]
    assert verify_experiment(opened).findings == ()


@pytest.mark.parametrize(
    ("part", "damage"), [("blobs", flip), ("blobs", truncate), ("blobs", remove), ("manifests", empty)]
)
def test_a_damaged_score_sheet_or_matrix_is_written_again(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture, part: str, damage: Damage
) -> None:
    opened = open_small(trained_folder)
    run(opened)
    before = write_score_matrix(opened).digest
    key = keys(opened)[0]
    folder = trained_folder / "store" / opened.layout.scores
    # Of one query's sheet, and of the matrix.
    victims = [
        folder / "blobs" / Path(write_scores(opened, key).path).name
        if part == "blobs"
        else next((folder / "manifests").glob(f"{key}.*")),
        next((folder / "matrix" / part).iterdir()),
    ]
    for victim in victims:
        damage(victim)
    digests = {query.key: query.scores_digest for query in query_statuses(opened)}
    assert [found is None for found in digests.values()] == [True, False, False]
    assert same_bits(scores(opened, key), undisturbed()[:, 0])
    assert write_score_matrix(opened).digest == before
    assert same_bits(run(opened), undisturbed())
    for victim in victims:
        assert named(caplog, victim)


def test_a_changed_state_under_a_valid_digest_is_refused(trained_folder: Path) -> None:
    """Sealed again with other numbers by another program: whole, of this training, and yet of another run."""
    opened = open_small(trained_folder)
    chain = opened.trajectory_chain
    checkpoint = chain.load(4, {})
    assert checkpoint is not None
    tensors = checkpoint.tensors("rank0")
    name = next(name for name in tensors if name.startswith("params/"))
    with chain.take() as lease:
        losses = checkpoint.tensors("losses")
        lease.seal(4, {"rank0": tensors | {name: tensors[name] + 1e-3}, "losses": losses}, checkpoint.facts)
    with pytest.raises(TrajectoryMismatchError, match="step 4|step 6"):
        run(opened)


def test_score_manifests_that_changed_places_are_found_and_never_read_for_each_other(
    trained_folder: Path, undisturbed: Undisturbed
) -> None:
    opened = open_small(trained_folder)
    expected = run(opened)
    first, second = sorted((trained_folder / "store" / opened.layout.scores / "manifests").glob("*.json"))[:2]
    mine, theirs = first.read_bytes(), second.read_bytes()
    first.write_bytes(theirs)
    second.write_bytes(mine)
    found = {finding.object.rpartition("/")[2] for finding in verify_experiment(opened).findings}
    assert {first.name, second.name} <= found
    assert [query.scores_digest is None for query in query_statuses(opened)].count(True) == 2
    assert same_bits(run(opened), expected) and same_bits(expected, undisturbed())
