"""What the instance's event log says of an experiment, beside what its store holds, and where the two differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES, RunsFilter

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.status import StoredExperiment
from magic_pipeline.orchestration.materializations import recorded_version, recorded_versions
from magic_pipeline.orchestration.partitions import ExperimentAssets


@dataclass(frozen=True)
class EventLogView:
    """`unfinished_runs` by id; `differences` are lines for people, each of which `run` repairs."""

    materialized: dict[str, int]
    unfinished_runs: tuple[str, ...]
    differences: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "materialized": self.materialized,
            "unfinished_runs": list(self.unfinished_runs),
            "differences": list(self.differences),
        }


def view_event_log(
    instance: dg.DagsterInstance, experiment: Experiment, stored: StoredExperiment | None
) -> EventLogView:
    """Compare the event log with the store's newest training fingerprint (None: the store is empty)."""
    assets = ExperimentAssets.of(experiment)
    view = _View(
        recorded_version(instance, assets.trajectory),
        recorded_versions(instance, assets.segments),
        recorded_versions(instance, assets.scores),
        recorded_version(instance, assets.matrix),
    )
    keys = {assets.trajectory, assets.segments, assets.scores, assets.matrix}
    runs = instance.get_runs(filters=RunsFilter(statuses=NOT_FINISHED_STATUSES))
    return EventLogView(
        {
            "training_trajectory": int(view.trajectory is not None),
            "segment_checkpoints": len(view.segments),
            "attribution_scores": len(view.scores),
            "score_matrix": int(view.matrix is not None),
        },
        tuple(run.run_id for run in runs if run.asset_selection and keys & run.asset_selection),
        tuple(_differences(view, stored, assets)) if stored is not None else (),
    )


@dataclass(frozen=True)
class _View:
    trajectory: str | None
    segments: dict[str, str]
    scores: dict[str, str]
    matrix: str | None


def _differences(view: _View, stored: StoredExperiment, assets: ExperimentAssets) -> Iterator[str]:
    if (line := _difference("training_trajectory", stored.trajectory.digest, view.trajectory)) is not None:
        yield line
    for query in stored.queries:
        for rank in assets.rank_keys:
            partition = assets.segment_key(query.key, rank)
            line = _difference(f"segment_checkpoints {partition}", query.walk_digest, view.segments.get(partition))
            if line is not None:
                yield line
        line = _difference(f"attribution_scores {query.key}", query.scores_digest, view.scores.get(query.key))
        if line is not None:
            yield line
    if (line := _difference("score_matrix", stored.matrix_digest, view.matrix)) is not None:
        yield line


def _difference(what: str, in_store: str | None, in_log: str | None) -> str | None:
    if in_store == in_log:
        return None
    if in_log is None:
        return f"{what}: finished in the store, not reported to Dagster"
    if in_store is None:
        return f"{what}: reported to Dagster, not finished in the store"
    return f"{what}: Dagster knows another version than the store's"
