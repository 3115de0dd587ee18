"""What a run tells while it works."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from magic_pipeline.attribution.observing import CheckpointSealed, TrainingProgress, WalkProgress
from magic_pipeline.orchestration import partitions
from magic_pipeline.orchestration.forwarded_logs import forwarded_logs
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets, add_query_keys
from magic_pipeline.orchestration.progress import LOST_TAG, RESUMED_TAG, RunProgress


class Context:
    """Takes the events that an op would log."""

    asset_key = dg.AssetKey("walk")

    def __init__(self, **tags: str) -> None:
        self.events: list[dg.AssetObservation] = []
        self.run, self.instance = SimpleNamespace(run_id="one", tags=tags), self

    def add_run_tags(self, run_id: str, tags: dict[str, str]) -> None:
        assert run_id == "one"
        self.run.tags |= tags

    def log_event(self, event: dg.AssetObservation) -> None:
        self.events.append(event)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with open_instance(tmp_path) as opened:
        yield opened


def walked(step: int) -> WalkProgress:
    return WalkProgress(step, 1000, 0, 32, ("a", "b"), 10.0, step / 10, {"a": 900, "b": None}, 5)


def test_a_thousand_steps_give_few_lines_and_one_observation(caplog: pytest.LogCaptureFixture) -> None:
    context = Context()
    progress = RunProgress(context)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "magic_pipeline"):
        for step in range(999, -1, -1):
            progress(walked(step))
        progress(CheckpointSealed("a", 0, 7))
    assert [record.getMessage() for record in caplog.records] == [
        "walk of 2 queries: at step 999, 0 of 32 segments done, 10 steps/s, 1 min 40 s left",
        "walk of 2 queries: at step 0, 0 of 32 segments done, 10 steps/s, 0 s left",
    ]
    assert len(context.events) == 1
    metadata = progress.metadata()
    assert {name: metadata[name] for name in ("steps_made", "checkpoints_sealed", "bytes_sealed")} == {
        "steps_made": 1000,
        "checkpoints_sealed": 1,
        "bytes_sealed": 7,
    }
    assert (metadata["resumed_from_step"], metadata["steps_redone"]) == (900, 5)


def test_the_run_is_tagged_with_what_was_resumed_and_lost() -> None:
    context = Context()
    progress = RunProgress(context)  # type: ignore[arg-type]
    progress(walked(899))
    assert context.run.tags == {RESUMED_TAG: "1 query from step 900", LOST_TAG: "at most 5 steps"}
    progress(replace(walked(700), keys=("c",), resumed_from={"c": 800}, steps_redone=0))
    assert context.run.tags == {RESUMED_TAG: "2 queries from steps 800 to 900", LOST_TAG: "at most 5 steps"}
    # A run from the start has none, and does not keep those of the run that it is executed again for.
    for tags in ({}, {RESUMED_TAG: "training from step 3"}):
        context = Context(**tags)
        RunProgress(context)(TrainingProgress(1, 10, 1.0, 5.0, 1.0, 0))  # type: ignore[arg-type]
        assert set(context.run.tags.values()) <= {"nothing"} and bool(context.run.tags) == bool(tags)


def test_work_that_does_not_move_is_reported_and_work_that_moves_is_not(caplog: pytest.LogCaptureFixture) -> None:
    progress = RunProgress(Context())  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "magic_pipeline"):
        with progress.watched(stall_seconds=5):
            for step in range(4):
                progress(TrainingProgress(step, 10, 1.0, 5.0, 1.0, 0))
                time.sleep(0.05)
        assert not caplog.records
        with progress.watched(stall_seconds=0.1):
            time.sleep(0.4)
    assert any("No step was finished" in record.getMessage() for record in caplog.records)


def test_this_projects_loggers_reach_the_runs_log_only_while_forwarded() -> None:
    seen: list[tuple[int, str]] = []

    class Log:
        def log(self, level: int, message: str) -> None:
            seen.append((level, message))

    project = logging.getLogger("magic_pipeline.checkpoints")
    with forwarded_logs(Log()):  # type: ignore[arg-type]
        project.warning("blob %s is damaged", "b")
    project.warning("later")
    assert seen == [(logging.WARNING, "blob b is damaged")]


def test_a_log_that_cannot_be_written_does_not_end_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    class Log:
        def log(self, level: int, message: str) -> None:
            raise RuntimeError("database is locked")

    with forwarded_logs(Log()):  # type: ignore[arg-type]
        logging.getLogger("magic_pipeline.checkpoints").warning("damaged")
    assert "database is locked" in capsys.readouterr().err


def test_thousands_of_query_keys_become_partitions_in_order_and_once(instance: dg.DagsterInstance) -> None:
    assets, keys = ExperimentAssets("many", 1), [f"query-{number}" for number in range(2500)]
    assert len(keys) > 10 * partitions._KEYS_AT_ONCE
    assert add_query_keys(instance, assets, keys[:1200]) == keys[:1200]
    assert add_query_keys(instance, assets, keys) == keys[1200:]
    assert list(instance.get_dynamic_partitions(assets.queries_name)) == keys
