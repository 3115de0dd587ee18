"""What Dagster's runs of an experiment are about: which queries they cover, which are busy, whose newest run failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES, DagsterRunStatus, RunsFilter
from dagster._core.storage.tags import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    AUTO_RETRY_RUN_ID_TAG,
    PARTITION_NAME_TAG,
    WILL_RETRY_TAG,
)

from magic_pipeline.orchestration.partitions import ExperimentAssets, add_query_keys

_RUNS_LOOKED_AT = 500


@dataclass(frozen=True)
class RunsOfExperiment:
    """By kind of run: attribute, score, collect.

    Attributes:
        busy: queries of runs that are queued, under way or will be retried.
        count: how many of those runs there are.
        failed: queries whose newest walk ended without success and is not retried.
    """

    busy: Mapping[str, frozenset[str]]
    count: Mapping[str, int]
    failed: frozenset[str]

    @classmethod
    def of(cls, instance: dg.DagsterInstance, assets: ExperimentAssets, order: Sequence[str]) -> RunsOfExperiment:
        """`order`: the query keys as their partitions are ordered, the newest run first."""
        kinds = {assets.segments: "attribute", assets.scores: "score", assets.matrix: "collect"}
        busy: dict[str, set[str]] = {kind: set() for kind in kinds.values()}
        count, failed, seen = dict.fromkeys(kinds.values(), 0), set[str](), set[str]()
        waiting = RunsFilter(statuses=[status for status in DagsterRunStatus if status not in FINISHED_STATUSES])
        runs = [*instance.get_runs(filters=waiting), *instance.get_runs(limit=_RUNS_LOOKED_AT)]
        for run in {one.run_id: one for one in runs}.values():
            chosen = [kind for key, kind in kinds.items() if key in (run.asset_selection or ())]
            chosen = chosen or [kind for kind in count if run.job_name == f"{assets.experiment}_{kind}"]
            keys = set(queries_of_run(run.tags, order))
            for kind in chosen:
                if not run.is_finished or _will_be_retried(run):
                    busy[kind] |= keys
                    count[kind] += 1
                elif kind == "attribute" and not run.is_success:
                    failed |= keys - seen
                seen |= keys if kind == "attribute" else set()
        return cls({kind: frozenset(keys) for kind, keys in busy.items()}, count, frozenset(failed))


def sync_query_keys(
    instance: dg.DagsterInstance, assets: ExperimentAssets, asked: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Make the partitions those of the queries that are asked now: (added, removed). A key that a run covers stays until that ends."""
    known = instance.get_dynamic_partitions(assets.queries_name)
    added = add_query_keys(instance, assets, asked)
    gone = [key for key in known if key not in set(asked)]
    if gone:
        busy = RunsOfExperiment.of(instance, assets, known).busy
        gone = [key for key in gone if not any(key in keys for keys in busy.values())]
    for key in gone:
        instance.delete_dynamic_partition(assets.queries_name, key)
    return added, gone


def _will_be_retried(run: dg.DagsterRun) -> bool:
    """And is not yet: the tag stays when the retry is launched, which then counts itself."""
    return run.tags.get(WILL_RETRY_TAG) == "true" and AUTO_RETRY_RUN_ID_TAG not in run.tags


def queries_of_run(tags: Mapping[str, str], order: Sequence[str]) -> Sequence[str]:
    """The queries of a run, by its partition or its range of partitions; none for a run that names others."""
    single = tags.get(PARTITION_NAME_TAG)
    first, last = tags.get(ASSET_PARTITION_RANGE_START_TAG, single), tags.get(ASSET_PARTITION_RANGE_END_TAG, single)
    ends = [end.partition("|")[0] for end in (first, last) if end is not None]
    if len(ends) < 2 or any(end not in order for end in ends):
        return ()
    return order[order.index(ends[0]) : order.index(ends[1]) + 1]
