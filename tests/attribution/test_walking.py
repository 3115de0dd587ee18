"""The walk: sealed where the plan says, resumed wherever it was broken off, each query at its own step, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from magic_pipeline.attribution.observing import CheckpointSealed, Event, QueryComplete, WalkProgress
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from magic_pipeline.checkpoints import Store
from magic_pipeline.errors import InputError, InterruptedWalkError, MagicError, NonFiniteError
from tests.attribution.running import (
    STEPS,
    TASKS,
    CrashError,
    crash_at,
    keys,
    open_small,
    run,
    same_bits,
    scores,
    stop_after,
    walked,
)

Undisturbed = Callable[..., Tensor]


def finish(folder: Path, undisturbed: Undisturbed) -> OpenExperiment:
    """Walks what is left; the scores must be those of an undisturbed run, to the last bit."""
    opened = open_small(folder)
    assert same_bits(run(opened), undisturbed())
    return opened


def test_queries_are_sealed_at_every_boundary_and_reported_when_complete(trained_folder: Path) -> None:
    opened, seen = open_small(trained_folder), list[Event]()
    report = walk(opened, keys(opened), observe=seen.append)
    assert [e.step for e in seen if isinstance(e, WalkProgress)] == [5, 4, 3, 2, 1, 0]
    for key in keys(opened):
        assert [e.step for e in seen if isinstance(e, CheckpointSealed) and e.key == key] == [4, 2]
    digests = {query.key: query.walk_digest for query in query_statuses(opened)}
    assert {e.key: e.digest for e in seen if isinstance(e, QueryComplete)} == digests
    assert (dict(report.resumed_from), report.steps_redone) == (dict.fromkeys(keys(opened)), 0)


def test_a_finished_query_is_never_walked_again(trained_folder: Path) -> None:
    opened, seen = open_small(trained_folder), list[Event]()
    walk(opened, keys(opened))
    objects = sorted(trained_folder.rglob("*"))
    report = walk(open_small(trained_folder), keys(opened), observe=seen.append)
    assert (seen, dict(report.resumed_from), sorted(trained_folder.rglob("*"))) == ([], {}, objects)


def test_what_lies_between_the_segments_boundaries_is_saved_exactly_where_it_was_asked_for(
    trained_folder: Path,
) -> None:
    opened, seen = open_small(trained_folder, attribution={"save_every": 3}), list[Event]()
    walk(opened, keys(opened), observe=seen.append)
    for key in keys(opened):
        assert [e.step for e in seen if isinstance(e, CheckpointSealed) and e.key == key] == [3]


def test_saves_count_back_from_the_end_of_the_run_whatever_the_segments_are(tmp_path: Path) -> None:
    attribution = {"save_every": 3, "segment_steps": 4}
    opened, seen = open_small(tmp_path, training={"batch_size": 2}, attribution=attribution), list[Event]()
    run(opened, observe=seen.append)
    first = keys(opened)[0]
    assert train(opened).boundaries == (0, 4, 8, 12)
    assert [e.step for e in seen if isinstance(e, CheckpointSealed) and e.key == first] == [9, 6, 3]


# A walk asks at every step, and a boundary is the last step of one segment and the first of the next.
@pytest.mark.parametrize(("asked", "step"), list(enumerate((6, 5, 4, 4, 3, 2, 2, 1))))
def test_a_walk_stopped_at_any_step_goes_on_from_that_very_step(
    trained_folder: Path, undisturbed: Undisturbed, asked: int, step: int
) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(InterruptedWalkError, match=f"stopped at step {step}"):
        walk(opened, keys(opened), should_stop=stop_after(asked))
    opened = finish(trained_folder, undisturbed)
    assert step in [start for start, _ in walked(opened, keys(opened)[0])]


@pytest.mark.parametrize("step", range(STEPS))
def test_a_walk_that_crashed_after_any_step_goes_on_from_its_last_seal(
    trained_folder: Path, undisturbed: Undisturbed, step: int
) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(CrashError):
        walk(opened, keys(opened), observe=crash_at(step, WalkProgress))
    opened = finish(trained_folder, undisturbed)
    begun = [start for start, _ in walked(opened, keys(opened)[0])]
    # The crash comes before the seal of its own step.
    again = STEPS - step // 2 * 2
    assert begun == sorted([6, 4, 2, again], reverse=True)


@pytest.mark.parametrize("seal", range(6))
def test_queries_join_at_their_own_steps_after_a_crash_between_two_seals(
    trained_folder: Path, undisturbed: Undisturbed, seal: int
) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(CrashError):
        walk(opened, keys(opened), observe=crash_at(seal, CheckpointSealed))
    reached = [query.step for query in query_statuses(opened)]
    assert len(set(reached)) == (1 if seal % 3 == 2 else 2)
    report = walk(open_small(trained_folder), keys(opened))
    assert list(report.resumed_from.values()) == reached
    opened = finish(trained_folder, undisturbed)
    for key in keys(opened):
        assert [start for start, _ in walked(opened, key)] in ([6, 4, 2], [6, 6, 4, 2], [6, 4, 4, 2])


@pytest.mark.parametrize("complete", range(2))
def test_a_crash_between_two_completions_leaves_the_finished_query_finished(
    trained_folder: Path, undisturbed: Undisturbed, complete: int
) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(CrashError):
        walk(opened, keys(opened), observe=crash_at(complete, QueryComplete))
    assert [query.complete for query in query_statuses(opened)] == [True, complete > 0, False]
    report = walk(open_small(trained_folder), keys(opened))
    assert list(report.resumed_from) == keys(opened)[complete + 1 :]
    finish(trained_folder, undisturbed)


@pytest.mark.parametrize("write", [0, 2, 4, 6, 8])
def test_an_exception_inside_any_save_costs_no_more_than_its_segment(
    trained_folder: Path, undisturbed: Undisturbed, write: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_blob, calls = Store.write_blob, iter(range(100))

    def failing(self: Store, *args: object, **settings: object) -> object:
        if next(calls) == write:
            raise RuntimeError("the disk went away")
        return write_blob(self, *args, **settings)  # type: ignore[arg-type]

    opened = open_small(trained_folder)
    with monkeypatch.context() as broken:
        broken.setattr(Store, "write_blob", failing)
        with pytest.raises(RuntimeError, match="the disk went away"):
            walk(opened, keys(opened))
    finish(trained_folder, undisturbed)


@pytest.mark.parametrize("written", [1, 2])
def test_a_crash_between_the_plans_of_a_cohort_does_not_tear_it_apart(
    trained_folder: Path, undisturbed: Undisturbed, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_json, plans = Store.create_json, iter(range(100))

    def failing(self: Store, path: str, content: dict[str, object]) -> None:
        if "/plans/" in path and next(plans) == written:
            raise CrashError(path)
        create_json(self, path, content)

    # Three lanes in one call; two queries planned on their own would make calls of two.
    opened = open_small(trained_folder, attribution={"chunk": 3})
    with monkeypatch.context() as broken:
        broken.setattr(Store, "create_json", failing)
        with pytest.raises(CrashError):
            walk(opened, keys(opened))
    opened = open_small(trained_folder, attribution={"chunk": 3})
    assert same_bits(run(opened), undisturbed(attribution={"chunk": 3}))
    assert walked(opened, keys(opened)[0]) == walked(opened, keys(opened)[2]) == [(6, 4), (4, 2), (2, 0)]


def test_a_walk_leaves_the_trajectory_and_one_object_of_scores_per_query(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    before = {path for path in trained_folder.rglob("*") if "trajectory" in path.parts}
    walk(opened, keys(opened))
    assert {path for path in trained_folder.rglob("*") if "trajectory" in path.parts} == before
    for query in opened.queries:
        chain = opened.query_chain(query)
        assert (chain.sealed(), len(chain.completions()), len(opened.store.list(chain.blobs))) == ([], 1, 1)


def test_two_generations_of_a_query_are_kept_while_it_is_walked(tmp_path: Path) -> None:
    opened, generations = open_small(tmp_path, training={"batch_size": 2}), list[int]()
    train(opened)

    def count(event: Event) -> None:
        if isinstance(event, CheckpointSealed):
            generations.append(len(opened.query_chain(opened.queries[0]).sealed()))

    walk(opened, keys(opened)[:1], observe=count)
    assert generations == [1, 2, 2]


def test_without_a_finished_training_there_is_no_walk_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    with pytest.raises(MagicError, match="no finished training trajectory .*materialize training_trajectory"):
        walk(opened, keys(opened))


def test_an_unknown_key_is_refused_before_anything_is_begun(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(InputError, match="no query with the key 'nobody'"):
        walk(opened, [keys(opened)[0], "nobody"])
    assert [query.sealed for query in query_statuses(opened)] == [0, 0, 0]


@pytest.mark.parametrize("query_batch", ["auto", 1])
@pytest.mark.parametrize(("task", "when"), [("NoGradientAtTheEnd", "its measurement"), ("OverflowingQuery", "at step")])
def test_a_query_that_is_not_finite_is_named_and_does_not_take_the_others_down(
    tmp_path: Path, undisturbed: Undisturbed, task: str, when: str, query_batch: object
) -> None:
    settings = {"chunk": 1, "query_batch": query_batch}
    opened = open_small(tmp_path, task={"type": f"{TASKS}:{task}"}, attribution=settings)
    train(opened)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=f"query 'first': .*{when}"):
            walk(opened, keys(opened))
        assert [query.complete for query in query_statuses(opened)] == [False, True, True]
    found = torch.stack([scores(opened, key) for key in keys(opened)[1:]], dim=1)
    assert same_bits(found, undisturbed(attribution={"chunk": 1})[:, 1:])
