"""The sensor and the nightly schedule of an experiment: new queries become partitions, and runs for what is not finished.

What to launch is decided by `decide`, from a `View` of file, store and event log: plain data, no side effects. Both are off until a
person turns them on.
"""

# No postponed annotations here: Dagster compares the annotation of `context` itself.

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.storage.dagster_run import FINISHED_STATUSES, DagsterRunStatus, RunsFilter
from dagster._core.storage.tags import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    PARTITION_NAME_TAG,
    WILL_RETRY_TAG,
)

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.queries import partition_keys
from magic_pipeline.orchestration.partitions import QUERIES_PER_RUN, ExperimentAssets, contiguous_blocks

logger = logging.getLogger("magic_pipeline.orchestration")

RUNS_AT_ONCE = (
    2  # of one kind; what waits longer is launched by a later tick, so that an outage is not followed by a flood
)
_RUNS_LOOKED_AT = 500
_INTERVAL_SECONDS = 60


@dataclass(frozen=True)
class View:
    """What the decision rests on. Queries are partition keys.

    Attributes:
        partitions: in Dagster, in their order.
        asked: in the queries file, or else in the store, in their order.
        trained: whether training with the file's settings is complete.
        walked, scored: finished in the store.
        collected: whether the score matrix is that of all scored queries.
        walking, scoring: of runs that are queued, under way or will be retried.
        runs: of each kind (attribute, score, collect), how many of those there are.
        held: by live processes.
        failed: whose newest run ended without success and is not retried: a person decides.
    """

    partitions: tuple[str, ...]
    asked: tuple[str, ...]
    trained: bool = False
    walked: frozenset[str] = frozenset()
    scored: frozenset[str] = frozenset()
    collected: bool = False
    walking: frozenset[str] = frozenset()
    scoring: frozenset[str] = frozenset()
    runs: Mapping[str, int] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """`add`: new partitions. `attribute`, `score`: blocks of queries, a run each. `collect`: whether to. `why`: for people."""

    add: tuple[str, ...] = ()
    attribute: tuple[tuple[str, ...], ...] = ()
    score: tuple[tuple[str, ...], ...] = ()
    collect: bool = False
    why: str = ""

    @property
    def runs(self) -> int:
        return len(self.attribute) + len(self.score) + self.collect


def decide(view: View, *, block: int = QUERIES_PER_RUN, most: int = RUNS_AT_ONCE) -> Decision:
    """What to launch now: no query twice, no finished query, and no more than `most` runs of a kind at once."""
    add = tuple(key for key in view.asked if key not in view.partitions)
    if not view.trained:
        return Decision(add, why="training is not complete: materialize training_trajectory, or turn its job on")
    order, asked = (*view.partitions, *add), set(view.asked)
    away = view.walking | view.held | view.failed
    to_walk = [key for key in view.asked if key not in view.walked and key not in away]
    to_score = [key for key in view.asked if key in view.walked and key not in view.scored | view.scoring]
    attribute = _blocks(order, to_walk, block, most - view.runs.get("attribute", 0))
    score = _blocks(order, to_score, block, most - view.runs.get("score", 0))
    scored = asked & view.scored
    idle = not (attribute or score or view.scoring or view.runs.get("collect", 0))
    collect = idle and bool(scored) and not view.collected
    return Decision(add, attribute, score, collect, _why(view, to_walk, asked))


def _blocks(order: Sequence[str], keys: Collection[str], block: int, most: int) -> tuple[tuple[str, ...], ...]:
    blocks = map(tuple, contiguous_blocks(order, set(keys), block))
    return tuple(one for _, one in zip(range(max(0, most)), blocks, strict=False))


def _why(view: View, to_walk: Sequence[str], asked: set[str]) -> str:
    parts = [f"{len(asked & view.walked)} of {len(asked)} queries walked, {len(asked & view.scored)} with scores"]
    for what, keys in (("in runs", view.walking), ("held by other processes", view.held - view.walking)):
        if asked & keys:
            parts.append(f"{len(asked & keys)} {what}")
    failed = sorted((asked & view.failed) - view.walked)
    if failed:
        parts.append(f"{len(failed)} failed and wait for a person (first {failed[0]}): execute their run again")
    return "; ".join(parts)


def queries_sensor(experiment: Experiment, jobs: Sequence[UnresolvedAssetJobDefinition]) -> dg.SensorDefinition:
    """Looks at the queries file and the store, adds partitions, and launches what is not finished."""
    assets, name = ExperimentAssets.of(experiment), experiment.name
    wanted = [job for job in jobs if job.name in (f"{name}_attribute", f"{name}_score", f"{name}_collect")]

    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        decision = decide(view_of(context.instance, experiment))
        requests = list(_requests(assets, decision))
        logger.info("%s: %s", experiment.name, decision.why)
        if not requests and not decision.add:
            return dg.SkipReason(decision.why)
        added = [assets.by_query().build_add_request(list(decision.add))] if decision.add else []
        return dg.SensorResult(run_requests=requests, dynamic_partitions_requests=added)

    return dg.SensorDefinition(
        name=f"{name}_queries",
        evaluation_fn=tick,
        jobs=wanted,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Attributes new and unfinished queries of the experiment, and writes and collects their scores.",
    )


def nightly_schedule(experiment: Experiment, jobs: Sequence[UnresolvedAssetJobDefinition]) -> dg.ScheduleDefinition:
    """Every night a run over all queries: what is finished and current is reported again, all else is made."""
    assets, name = ExperimentAssets.of(experiment), f"{experiment.name}_attribute"

    def evaluate(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        keys = context.instance.get_dynamic_partitions(assets.queries_name)
        if not keys:
            yield dg.SkipReason("there are no partitions yet: materialize training_trajectory first")
        for at in range(0, len(keys), QUERIES_PER_RUN):
            request = _walk(assets, keys[at : at + QUERIES_PER_RUN])
            # Dagster asks for it where there are several; another night is another key.
            yield request._replace(run_key=f"{context.scheduled_execution_time.isoformat()} {keys[at]}")

    return dg.ScheduleDefinition(
        name=f"{experiment.name}_nightly",
        cron_schedule="0 2 * * *",
        job=next(job for job in jobs if job.name == name),
        execution_fn=evaluate,
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Walks every query that is missing or whose text, data or training has changed.",
    )


def view_of(instance: dg.DagsterInstance, experiment: Experiment) -> View:
    """Looks at file, store and event log. Imports no torch."""
    from magic_pipeline.attribution.status import current_training

    assets = ExperimentAssets.of(experiment)
    partitions = tuple(instance.get_dynamic_partitions(assets.queries_name))
    stored = current_training(experiment)
    queries = () if stored is None else stored.queries
    asked = _keys_in_file(experiment) or tuple(query.key for query in queries)
    order = (*partitions, *(key for key in asked if key not in partitions))
    runs = _Runs.of(instance, assets, order)
    walked = frozenset(query.key for query in queries if query.complete)
    return View(
        partitions=partitions,
        asked=asked,
        trained=stored is not None and stored.trajectory.complete,
        walked=walked,
        scored=frozenset(query.key for query in queries if query.scores_digest is not None),
        collected=stored is not None and stored.matrix_digest is not None,
        walking=runs.busy["attribute"],
        scoring=runs.busy["score"],
        runs=runs.count,
        held=frozenset() if stored is None else frozenset(stored.holders) - walked,
        failed=runs.failed - walked,
    )


def _keys_in_file(experiment: Experiment) -> tuple[str, ...]:
    """Of the queries file; empty where the queries come from elsewhere. Raises InputError where the file is wrong."""
    from magic_pipeline.tasks.query_source import read_query_lines

    if experiment.queries.file is None:
        return ()
    lines = read_query_lines(Path(experiment.resolve(experiment.queries.file)))
    return tuple(partition_keys(line.id for line in lines).values())


@dataclass(frozen=True)
class _Runs:
    """What Dagster's runs of an experiment are about, the newest first."""

    busy: Mapping[str, frozenset[str]]
    count: Mapping[str, int]
    failed: frozenset[str]

    @classmethod
    def of(cls, instance: dg.DagsterInstance, assets: ExperimentAssets, order: Sequence[str]) -> "_Runs":
        kinds = {assets.segments: "attribute", assets.scores: "score", assets.matrix: "collect"}
        busy: dict[str, set[str]] = {kind: set() for kind in kinds.values()}
        count, failed, seen = dict.fromkeys(kinds.values(), 0), set[str](), set[str]()
        waiting = RunsFilter(statuses=[status for status in DagsterRunStatus if status not in FINISHED_STATUSES])
        runs = [*instance.get_runs(filters=waiting), *instance.get_runs(limit=_RUNS_LOOKED_AT)]
        for run in {one.run_id: one for one in runs}.values():
            chosen = [kind for key, kind in kinds.items() if key in (run.asset_selection or ())]
            chosen = chosen or [kind for kind in count if run.job_name == f"{assets.experiment}_{kind}"]
            keys = set(_keys_of(run.tags, order))
            for kind in chosen:
                if not run.is_finished or run.tags.get(WILL_RETRY_TAG) == "true":
                    busy[kind] |= keys
                    count[kind] += 1
                elif kind == "attribute" and not run.is_success:
                    failed |= keys - seen
                seen |= keys if kind == "attribute" else set()
        return cls({kind: frozenset(keys) for kind, keys in busy.items()}, count, frozenset(failed))


def _keys_of(tags: Mapping[str, str], order: Sequence[str]) -> Sequence[str]:
    """The queries of a run, by its partition or its range of partitions; none for a run that names others."""
    single = tags.get(PARTITION_NAME_TAG)
    first, last = tags.get(ASSET_PARTITION_RANGE_START_TAG, single), tags.get(ASSET_PARTITION_RANGE_END_TAG, single)
    ends = [end.partition("|")[0] for end in (first, last) if end is not None]
    if len(ends) < 2 or any(end not in order for end in ends):
        return ()
    return order[order.index(ends[0]) : order.index(ends[1]) + 1]


def _requests(assets: ExperimentAssets, decision: Decision) -> Iterator[dg.RunRequest]:
    for block in decision.attribute:
        yield _walk(assets, block)
    for block in decision.score:
        yield _over_range(f"{assets.experiment}_score", block[0], block[-1])
    if decision.collect:
        yield dg.RunRequest(job_name=f"{assets.experiment}_collect")


def _walk(assets: ExperimentAssets, block: Sequence[str]) -> dg.RunRequest:
    """One run over all ranks of a block of queries: a rectangle."""
    first, last = assets.rank_keys[0], assets.rank_keys[-1]
    ends = assets.segment_key(block[0], first), assets.segment_key(block[-1], last)
    return _over_range(f"{assets.experiment}_attribute", *ends)


def _over_range(job: str, first: str, last: str) -> dg.RunRequest:
    tags = {ASSET_PARTITION_RANGE_START_TAG: first, ASSET_PARTITION_RANGE_END_TAG: last}
    return dg.RunRequest(job_name=job, tags=tags)
