"""The sensor and the nightly schedule of an experiment: new queries become partitions, and runs for what is not finished.

What to launch is decided by `decide`, from a `View` of file, store and event log: plain data, no side effects. Both are off until a
person turns them on.
"""

# No postponed annotations here: Dagster compares the annotation of `context` itself.

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG, ASSET_PARTITION_RANGE_START_TAG

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.queries import partition_keys
from magic_pipeline.orchestration.instance import GPU_POOL
from magic_pipeline.orchestration.partitions import QUERIES_PER_RUN, ExperimentAssets, contiguous_blocks
from magic_pipeline.orchestration.runs_of_experiment import RunsOfExperiment

logger = logging.getLogger("magic_pipeline.orchestration")

_INTERVAL_SECONDS = 30


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
    """What is to be done now.

    Attributes:
        add, remove: partitions of new queries, and of those that are asked no more (once no run covers them).
        attribute, score: blocks of queries, a run each.
        collect: whether to make the score matrix.
        why: for people.
    """

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    attribute: tuple[tuple[str, ...], ...] = ()
    score: tuple[tuple[str, ...], ...] = ()
    collect: bool = False
    why: str = ""

    @property
    def runs(self) -> int:
        return len(self.attribute) + len(self.score) + self.collect


def decide(view: View, *, block: int = QUERIES_PER_RUN, most: int = 2) -> Decision:
    """What to launch now: no query twice, no finished query, and no more than `most` runs of a kind at once."""
    asked = set(view.asked)
    add = tuple(key for key in view.asked if key not in view.partitions)
    busy = asked | view.walking | view.scoring
    remove = tuple(key for key in view.partitions if key not in busy) if asked else ()
    if not view.trained:
        return Decision(
            add, remove, why="training is not complete: materialize training_trajectory, or turn its job on"
        )
    order = (*(key for key in view.partitions if key not in remove), *add)
    away = view.walking | view.held | view.failed
    to_walk = [key for key in view.asked if key not in view.walked and key not in away]
    to_score = [key for key in view.asked if key in view.walked and key not in view.scored | view.scoring]
    attribute = _blocks(order, to_walk, block, most - view.runs.get("attribute", 0))
    score = _blocks(order, to_score, block, most - view.runs.get("score", 0))
    scored = asked & view.scored
    idle = not (attribute or score or view.scoring or view.runs.get("collect", 0))
    collect = idle and bool(scored) and not view.collected
    return Decision(add, remove, attribute, score, collect, _why(view, to_walk, asked))


def runs_at_once(instance: dg.DagsterInstance) -> int:
    """How many runs of a kind there may be: as many as the pool of devices admits, and one that waits.

    What would wait longer is launched by a later tick, so that an outage is not followed by a flood.
    """
    limits = {limit.name: limit.limit for limit in instance.event_log_storage.get_pool_limits()}
    default = instance.get_concurrency_config().pool_config.default_pool_limit
    return 1 + max(1, limits.get(GPU_POOL) or default or 1)


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
        decision = decide(view_of(context.instance, experiment), most=runs_at_once(context.instance))
        requests = list(_requests(assets, decision))
        logger.info("%s: %s", experiment.name, decision.why)
        changes: list[Any] = []
        if decision.add:
            changes.append(assets.by_query().build_add_request(list(decision.add)))
        if decision.remove:
            changes.append(assets.by_query().build_delete_request(list(decision.remove)))
        if not requests and not changes:
            return dg.SkipReason(decision.why)
        return dg.SensorResult(run_requests=requests, dynamic_partitions_requests=changes)

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
    runs = RunsOfExperiment.of(instance, assets, order)
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
    from magic_pipeline.attribution.queries_file import local_queries_file
    from magic_pipeline.tasks.query_source import read_query_lines

    file = local_queries_file(experiment)
    if file is None:
        return ()
    lines = read_query_lines(file)
    return tuple(partition_keys(line.id for line in lines).values())


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
