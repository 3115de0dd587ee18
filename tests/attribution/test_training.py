"""Training: sealed at boundaries, resumed wherever it was broken off, never made twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from magic_pipeline.attribution.observing import CheckpointSealed, Event, TrainingProgress
from magic_pipeline.attribution.status import trajectory_status
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.trajectory import Trajectory
from magic_pipeline.checkpoints import Store
from magic_pipeline.errors import InterruptedWalkError, NonFiniteError
from tests.attribution.running import STEPS, TASKS, CrashError, crash_at, open_small, stop_after, trained


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    """The trajectory of a run that nothing disturbed; its digest is over the bits of every boundary state."""
    return train(open_small(tmp_path_factory.mktemp("whole")))


def test_every_boundary_is_sealed_once_and_every_step_is_observed_once(tmp_path: Path) -> None:
    seen: list[Event] = []
    trajectory = train(open_small(tmp_path), observe=seen.append)
    assert trajectory.boundaries == (0, 2, 4, 6)
    assert [event.step for event in seen if isinstance(event, CheckpointSealed)] == [0, 2, 4, 6]
    assert [event.step for event in seen if isinstance(event, TrainingProgress)] == [1, 2, 3, 4, 5, 6]
    assert [event.loss for event in seen if isinstance(event, TrainingProgress)] == trajectory.losses


def test_a_finished_training_is_returned_and_not_made_again(tmp_path: Path) -> None:
    first = train(open_small(tmp_path))
    seen: list[Event] = []
    again = train(open_small(tmp_path), observe=seen.append)
    assert (again.digest, again.losses, again.resumed_from, seen) == (first.digest, first.losses, STEPS, [])


@pytest.mark.parametrize("step", range(STEPS))
def test_training_stopped_before_any_step_goes_on_from_that_very_step(
    tmp_path: Path, whole: Trajectory, step: int
) -> None:
    with pytest.raises(InterruptedWalkError, match=f"stopped before step {step}"):
        train(open_small(tmp_path), should_stop=stop_after(step))
    opened = open_small(tmp_path)
    trajectory = train(opened)
    assert (trajectory.resumed_from, trajectory.digest, trajectory.losses) == (step, whole.digest, whole.losses)
    assert sum(stop - start for start, stop in trained(opened)) <= STEPS + 2


@pytest.mark.parametrize("step", range(STEPS))
def test_training_that_crashed_after_any_step_goes_on_from_the_boundary_before(
    tmp_path: Path, whole: Trajectory, step: int
) -> None:
    with pytest.raises(CrashError):
        train(open_small(tmp_path), observe=crash_at(step, TrainingProgress))
    opened = open_small(tmp_path)
    trajectory = train(opened)
    assert (trajectory.resumed_from, trajectory.digest) == (step // 2 * 2, whole.digest)
    assert [start for start, _ in trained(opened)].count(0) == (2 if step < 2 else 1)


@pytest.mark.parametrize("seal", range(4))
def test_training_that_crashed_after_any_seal_makes_no_sealed_step_again(
    tmp_path: Path, whole: Trajectory, seal: int
) -> None:
    with pytest.raises(CrashError):
        train(open_small(tmp_path), observe=crash_at(seal, CheckpointSealed))
    opened = open_small(tmp_path)
    trajectory = train(opened)
    assert (trajectory.resumed_from, trajectory.digest, trajectory.losses) == (2 * seal, whole.digest, whole.losses)
    assert trained(opened) == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize("write", [0, 1, 2, 5, 8])
def test_an_exception_inside_any_save_costs_no_more_than_its_segment(
    tmp_path: Path, whole: Trajectory, write: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_blob, calls = Store.write_blob, iter(range(100))

    def failing(self: Store, *args: object, **settings: object) -> object:
        if next(calls) == write:
            raise RuntimeError("the disk went away")
        return write_blob(self, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "write_blob", failing)
    opened = open_small(tmp_path)
    with pytest.raises(RuntimeError, match="the disk went away"):
        train(opened)
    assert not trajectory_status(opened).complete
    assert train(opened).digest == whole.digest
    assert len(trained(opened)) <= 4


def test_the_sealed_segments_are_kept_when_the_setting_changes_in_between(tmp_path: Path, whole: Trajectory) -> None:
    with pytest.raises(InterruptedWalkError):
        train(open_small(tmp_path), should_stop=stop_after(3))
    opened = open_small(tmp_path, attribution={"segment_steps": 5})
    trajectory = train(opened)
    assert (trajectory.boundaries, trajectory.digest) == ((0, 2, 4, 6), whole.digest)


def test_a_nan_loss_stops_at_its_step_names_it_and_completes_nothing(tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text("[[0, 1], [2, 3], [4, 5], [10, 11], [6, 7]]")
    opened = open_small(tmp_path, task={"type": f"{TASKS}:BrokenExample"}, training={"order": "order.json"})
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="the loss of training step 3 is nan"):
            train(opened)
        assert not trajectory_status(opened).complete


def test_diverging_training_is_never_complete(tmp_path: Path) -> None:
    opened = open_small(
        tmp_path, training={"optimizer": {"name": "sgd", "lr": 1e308}, "schedule": {"name": "constant"}}
    )
    with pytest.raises(NonFiniteError, match="step"):
        train(opened)
    assert not trajectory_status(opened).complete
