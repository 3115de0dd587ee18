"""A finished experiment's states are freed, and made again when a new query needs them: the same bits, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magic_pipeline.attribution.collecting import collect
from magic_pipeline.attribution.observing import Event, TrainingProgress, WalkProgress
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import read_matrix, write_score_matrix
from magic_pipeline.attribution.status import matrix_digest, query_statuses, stored_status, trajectory_status
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import HeldError, InterruptedWalkError, TrajectoryMismatchError
from tests.attribution.clutter import tree, writer_at_work
from tests.attribution.running import keys, open_small, relative_error, run, same_bits, stop_after
from tests.attribution.small_task import SmallTask

Undisturbed = Callable[..., Tensor]
# The queries of this task are not part of its settings, so that there can be new ones of the same training.
TASK: dict[str, Any] = {"type": "linear_regression", "examples": 12, "features": 7}


def asked(folder: Path, count: int, **changes: Any) -> OpenExperiment:
    return open_small(folder, **{"task": TASK, "queries": {"split": "test", "count": count}, **changes})


def finished(folder: Path, count: int, **changes: Any) -> OpenExperiment:
    opened = asked(folder, count, **changes)
    run(opened)
    write_score_matrix(opened)
    return opened


def free_states(opened: OpenExperiment) -> None:
    found = collect(opened.experiment, free=True, trajectories=True)
    assert [one.kind for one in found.freed if one.kind == "trajectory"] == ["trajectory"]
    assert opened.trajectory_chain.sealed() == []


def steps_trained(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, TrainingProgress)]


def test_states_stay_while_a_query_is_not_walked(tmp_path: Path) -> None:
    finished(tmp_path, 1)
    opened = asked(tmp_path, 2)
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened), should_stop=stop_after(3))
    before = tree(opened)
    found = collect(opened.experiment, free=True, trajectories=True)
    assert not any(one.kind == "trajectory" for one in found.freed)
    [kept] = [one for one in found.kept if "states" in one.what]
    assert kept.why == "1 of 2 queries are not walked"
    assert set(tree(opened)) == set(before)
    walk(opened, keys(opened))
    free_states(opened)


def test_without_states_status_scores_and_reruns_are_as_before(tmp_path: Path, any_storage: dict[str, Any]) -> None:
    opened = finished(tmp_path, 2, **any_storage)
    before = run(opened)
    statuses, trajectory, matrix = query_statuses(opened), trajectory_status(opened), matrix_digest(opened)
    size = sum(tree(opened).values())
    free_states(opened)
    assert sum(tree(opened).values()) < size
    assert (query_statuses(opened), trajectory_status(opened), matrix_digest(opened)) == (statuses, trajectory, matrix)
    [stored] = stored_status(opened.experiment)
    assert stored.trajectory.complete
    events: list[Event] = []
    assert same_bits(run(opened, observe=events.append), before)
    # Training that is asked for again makes the freed states again, under the digest rule; no query is walked again.
    assert not any(isinstance(event, WalkProgress) for event in events)
    # A sheet that is lost is made again from the walk's result.
    for name in opened.store.list(f"{opened.layout.scores}/manifests"):
        opened.store.delete(f"{opened.layout.scores}/manifests/{name}")
    assert same_bits(run(opened), before)
    assert verify_experiment(opened).findings[:-2] == ()
    assert {finding.kind for finding in verify_experiment(opened).findings} == {"orphaned"}


def test_a_new_query_trains_again_to_the_same_bits_and_finished_ones_are_not_walked_again(tmp_path: Path) -> None:
    opened = finished(tmp_path / "freed", 2)
    before = run(opened)
    trajectory = trajectory_status(opened)
    free_states(opened)
    # Other settings change nothing: what was sealed decides.
    changed = {"attribution": {"segment_steps": 1, "threads": 2}, "training": {"microbatch_size": 1}}
    more = asked(tmp_path / "freed", 3, **changed)
    assert more.fingerprint == opened.fingerprint
    events: list[Event] = []
    found = run(more, observe=events.append)
    assert trajectory_status(more) == trajectory
    assert steps_trained(events) == [1, 2, 3, 4, 5, 6]
    assert same_bits(found[:, :2], before)
    kept = finished(tmp_path / "kept", 2)
    again = asked(tmp_path / "kept", 3)
    assert same_bits(found, run(again))
    assert [name.step for name in more.trajectory_chain.sealed()] == [0, 2, 4, 6]
    assert verify_experiment(more).findings == ()
    assert kept.fingerprint == more.fingerprint
    # They are the states of the sealed trajectory: freed and needed again, all is as the first time.
    write_score_matrix(more)
    free_states(more)
    assert read_matrix(more).scores.shape == (12, 3)


def test_making_them_again_may_be_stopped_and_goes_on(tmp_path: Path) -> None:
    opened = finished(tmp_path, 1)
    free_states(opened)
    more = asked(tmp_path, 2)
    with pytest.raises(InterruptedWalkError, match="before step 3"):
        walk(more, keys(more), should_stop=stop_after(3))
    assert [name.step for name in more.trajectory_chain.sealed()] == [0, 2]
    events: list[Event] = []
    walk(more, keys(more), observe=events.append)
    assert steps_trained(events) == [3, 4, 5, 6]
    assert all(query.complete for query in query_statuses(more))


def test_only_the_missing_states_are_made_again(trained_folder: Path, undisturbed: Undisturbed) -> None:
    opened = open_small(trained_folder, training={"microbatch_size": 1})  # what was sealed decides
    chain = opened.trajectory_chain
    for name in chain.sealed():
        if name.step in (0, 4):
            opened.store.delete(chain.path(name))
    events: list[Event] = []
    assert same_bits(run(opened, observe=events.append), undisturbed())
    assert steps_trained(events) == [3, 4]
    assert {name.step for name in chain.sealed()} == {0, 2, 4, 6}


def test_whoever_makes_them_again_is_waited_for(tmp_path: Path) -> None:
    opened = finished(tmp_path, 1)
    free_states(opened)
    more = asked(tmp_path, 2)
    with (
        writer_at_work(more.trajectory_chain) as (process, _),
        pytest.raises(HeldError, match=f"process {process.pid}"),
    ):
        walk(more, keys(more))
    walk(more, keys(more))
    assert all(query.complete for query in query_statuses(more))


def test_states_that_come_out_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is computed in another order now, which no fingerprint can know."""
    # Its queries are settings of this task, so that the new one has to be a finished one that is lost.
    opened = open_small(tmp_path)
    before = run(opened)
    free_states(opened)
    first = opened.query_chain(opened.queries[0])
    opened.store.delete(first.path(first.completions()[0]))

    def other_losses(self: SmallTask, model: nn.Module, batch: Any, /) -> Tensor:
        logits = model(batch["x"])
        rows = torch.arange(len(batch["y"]))
        losses: Tensor = torch.log(torch.exp(logits).sum(1)) - logits[rows, batch["y"]]
        return losses

    with monkeypatch.context() as patch:
        patch.setattr(SmallTask, "example_losses", other_losses)
        changed = open_small(tmp_path)
        assert changed.fingerprint == opened.fingerprint
        with pytest.raises(
            TrajectoryMismatchError, match=r"training does not give the same bits again .*--fingerprint"
        ):
            walk(changed, keys(changed))
        assert {name.step for name in opened.trajectory_chain.sealed()} == {0}
    assert relative_error(run(open_small(tmp_path)), before) < 1e-12


def test_walks_over_a_trajectory_that_is_lost_are_foreign_to_a_new_one(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    opened = open_small(tmp_path)
    run(opened)
    write_score_matrix(opened)
    free_states(opened)
    chain = opened.trajectory_chain
    opened.store.delete(chain.path(chain.completions()[0]))
    other = open_small(tmp_path, attribution={"segment_steps": 3})
    old = trajectory_status(opened)
    assert not old.complete
    train(other)
    assert trajectory_status(other).boundaries == (0, 3, 6)
    assert not any(query.complete for query in query_statuses(other))
    findings = verify_experiment(other).findings
    foreign = [finding for finding in findings if finding.kind == "foreign"]
    assert len(foreign) == 3
    assert all("trajectory: expected" in finding.problem for finding in foreign)
    # The results of the former trajectory stay until there are new ones.
    assert not any("complete" in path for one in collect(other.experiment).freed for path in one.paths)
    walk(other, keys(other))
    done = collect(other.experiment, older_than=0, free=True)
    assert not any("/scores/" in path for one in done.freed for path in one.paths)  # there are no newer ones yet
    assert relative_error(run(other), undisturbed()) < 1e-10
    write_score_matrix(other)
    done = collect(other.experiment, older_than=0, free=True)
    assert {one.kind for one in done.freed} >= {"superseded"}
    assert verify_experiment(other).findings == ()
    assert len(other.store.list(f"{other.layout.scores}/manifests")) == 3
    assert len(other.store.list(f"{other.layout.matrix}/manifests")) == 1


def test_segments_over_a_trajectory_that_is_lost_are_freed(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened), should_stop=stop_after(5))
    chain = opened.trajectory_chain
    for name in [*chain.completions(), *chain.sealed()]:
        opened.store.delete(chain.path(name))
    assert collect(opened.experiment).freed == ()  # nobody knows yet which trajectory it will be
    other = open_small(trained_folder, attribution={"segment_steps": 3})
    train(other)
    done = collect(other.experiment, older_than=0, free=True)
    manifests = {path for one in done.freed if one.kind == "foreign" for path in one.paths if "manifests" in path}
    assert len(manifests) == 6
    assert verify_experiment(other).findings == ()
    walk(other, keys(other))
    assert all(query.complete for query in query_statuses(other))
