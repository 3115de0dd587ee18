"""What an experiment is made from, as observed source assets: `training_data` and `queries`. A change shows downstream as stale.

They are opened to be observed, as only the task knows its data. Every op observes what it opens; the sensor `{experiment}_inputs` has
them observed when a file of the experiment was changed.
"""

# No postponed annotations here: Dagster compares the annotation of `context` itself.

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.experiment_settings import TableSchedule
from magic_pipeline.attribution.queries_file import local_queries_file
from magic_pipeline.checkpoints.digests import fingerprint
from magic_pipeline.orchestration.materializations import (
    Input,
    log_observation,
    observed_version,
    observed_versions,
    read_inputs_again,
)
from magic_pipeline.orchestration.operating import opened_once, operating
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.runs_of_experiment import sync_query_keys

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment

logger = logging.getLogger("magic_pipeline.orchestration")

_INTERVAL_SECONDS = 60
# Of a folder that the task names: asking for each file's time takes a while where there are very many.
_FILES_LOOKED_AT = 20_000


def inputs_assets(experiment: Experiment) -> list[dg.AssetsDefinition]:
    """The two sources, observed by opening the experiment."""
    assets = ExperimentAssets.of(experiment)
    data_spec = dg.AssetSpec(
        assets.training_data,
        group_name=experiment.name,
        description=(
            "The training examples, the initial weights, the order of the batches, the learning rates and the task's version, as they "
            "were when last looked at."
        ),
    )
    queries_spec = dg.AssetSpec(
        assets.queries,
        group_name=experiment.name,
        description="The queries that are asked: a partition each, whose version changes with the query's content.",
        skippable=True,
    )

    names = {key: key.to_python_identifier() for key in (assets.training_data, assets.queries)}

    @dg.multi_observable_source_asset(specs=[data_spec], name=names[assets.training_data])  # type: ignore[untyped-decorator] # Dagster's
    def training_data(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
        with operating(context):
            opened = _opened(experiment)
            version = dg.DataVersion(training_data_version(opened))
            yield dg.ObserveResult(data_version=version, metadata=_data_metadata(opened))

    @dg.multi_observable_source_asset(  # type: ignore[untyped-decorator] # Dagster's
        specs=[queries_spec], name=names[assets.queries], partitions_def=assets.by_query()
    )
    def queries(context: dg.AssetExecutionContext) -> Iterator[Any]:
        with operating(context):
            opened = _opened(experiment)
            keys = [query.key for query in opened.queries]
            added, removed = sync_query_keys(context.instance, assets, keys)
            logger.info("%d queries, %d of them new; %d are asked no more", len(keys), len(added), len(removed))
            _observe_queries(context, assets, opened, keys)
        yield from ()

    return [training_data, queries]


def observe_job(experiment: Experiment) -> UnresolvedAssetJobDefinition:
    """Looks at data and queries again."""
    assets = ExperimentAssets.of(experiment)
    return dg.define_asset_job(
        f"{experiment.name}_observe",
        selection=dg.AssetSelection.assets(assets.training_data, assets.queries),
        executor_def=dg.in_process_executor,
        description="Look at the data and the queries again: what was made from others shows as stale.",
    )


def inputs_sensor(experiment: Experiment, job: UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """Has the inputs observed when a file that the experiment names was changed."""

    def tick(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        stamp = files_stamp(experiment)
        if stamp == context.cursor:
            return dg.SkipReason("no file of the experiment was changed")
        context.update_cursor(stamp)
        # No run key: Dagster launches one only once, and a file that is put back with its old time has a stamp that was seen before.
        return dg.RunRequest()

    return dg.SensorDefinition(
        name=f"{experiment.name}_inputs",
        evaluation_fn=tick,
        job=job,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Looks at the data and the queries again when a file of the experiment was changed.",
    )


def training_data_version(opened: "OpenExperiment") -> str:
    """Changes with everything that the trained model is made from and that is no setting of the experiment file."""
    return fingerprint(_data_digests(opened))


def observe_sources(
    context: dg.AssetExecutionContext, assets: ExperimentAssets, opened: "OpenExperiment", keys: Sequence[str]
) -> Callable[[str], list[Input]]:
    """Reports what was opened where it is news: the training data and the queries of these keys. Returns what a query's partition was
    made from, by the query's key."""
    data = observe_training_data(context, assets, opened)
    queries = _observe_queries(context, assets, opened, keys)

    def sources_of(key: str) -> list[Input]:
        return [data, Input(assets.queries, queries[key], key, observed=True)]

    return sources_of


def open_and_observe(
    context: dg.AssetExecutionContext, assets: ExperimentAssets, experiment: Experiment
) -> "OpenExperiment":
    """For an op whose output Dagster records: the experiment, its training data reported where that is news."""
    opened = opened_once(experiment)
    observe_training_data(context, assets, opened)
    read_inputs_again(context)
    return opened


def observe_training_data(
    context: dg.AssetExecutionContext, assets: ExperimentAssets, opened: "OpenExperiment"
) -> Input:
    """Reports what was opened, where it is news."""
    version = training_data_version(opened)
    if observed_version(context.instance, assets.training_data) != version:
        log_observation(context, assets.training_data, version, metadata=_data_metadata(opened))
    return Input(assets.training_data, version, observed=True)


def _observe_queries(
    context: dg.AssetExecutionContext, assets: ExperimentAssets, opened: "OpenExperiment", keys: Sequence[str]
) -> dict[str, str]:
    """Reports those whose content is news; the digests of all of them."""
    known, wanted = observed_versions(context.instance, assets.queries), set(keys)
    queries = [query for query in opened.queries if query.key in wanted]
    for query in queries:
        if known.get(query.key) != query.digest:
            log_observation(context, assets.queries, query.digest, partition=query.key, metadata={"query": query.id})
    return {query.key: query.digest for query in queries}


def files_stamp(experiment: Experiment) -> str:
    """Changes when a file is changed that the experiment names: by size and time, since this is asked every minute.

    A queries file at a URL is copied first, which renews the copy only where the content is another. Raises as that does.
    """
    digest = hashlib.sha256()
    for path in _files(experiment):
        try:
            status = path.stat()
        except OSError:
            continue
        digest.update(f"{path}|{status.st_size}|{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _files(experiment: Experiment) -> Iterator[Path]:
    schedule = experiment.training.schedule
    queries = local_queries_file(experiment)
    named = [experiment.init, experiment.training.order, None if queries is None else str(queries)]
    named.append(schedule.values if isinstance(schedule, TableSchedule) else None)
    module = experiment.task.type.partition(":")[0].replace(".", "/")
    named += [f"{module}.py", *_texts(experiment.task.settings)]
    if experiment.path is not None:
        yield experiment.path
    for name in named:
        path = None if not name or "\0" in name or "://" in name else experiment.resolve(name)
        if path is not None and path.is_dir():
            yield from islice(path.rglob("*"), _FILES_LOOKED_AT)
        elif path is not None:
            yield path


def _texts(value: Any) -> Iterator[str]:
    """Every text in a task's settings, any of which may be a file's name."""
    if isinstance(value, str) and len(value) < 1024:
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value[:100]:
            yield from _texts(one)


def _opened(experiment: Experiment) -> "OpenExperiment":
    """On the CPU: to be looked at it needs no memory of a device that others work on."""
    return opened_once(experiment.model_copy(update={"device": "cpu"}))


def _data_digests(opened: "OpenExperiment") -> dict[str, str]:
    names = ("data", "initial_weights", "order", "learning_rates")
    return {name: str(opened.facts[name]) for name in names} | {"task_version": opened.facts["task"]["version"]}


def _data_metadata(opened: "OpenExperiment") -> dict[str, Any]:
    return {"examples": len(opened.dataset), **_data_digests(opened)}
