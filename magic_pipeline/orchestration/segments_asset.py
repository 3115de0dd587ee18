"""The asset `segment_checkpoints`: a materialized partition (query, rank) = that query's walk is complete on that rank.

One op runs the gang: whatever ranks it was asked for, it walks its queries on all of them, together, and reports each
partition by an event of its own as soon as it is complete. What was complete before is reported first: Dagster shows
a planned partition that gets no event as failed.
"""

# No postponed annotations here: Dagster compares the annotation of `context` itself.

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.observing import Event, QueryComplete
from magic_pipeline.errors import HeldError, InputError, InterruptedWalkError
from magic_pipeline.orchestration.asset_versions import walk_code_version
from magic_pipeline.orchestration.inputs_assets import observe_sources
from magic_pipeline.orchestration.instance import GPU_POOL
from magic_pipeline.orchestration.interrupts import deferred_interrupts
from magic_pipeline.orchestration.launch_settings import WalkSettings
from magic_pipeline.orchestration.materializations import Input, log_partitions
from magic_pipeline.orchestration.operating import opened_once, operating, stall_limit, wait_while_held
from magic_pipeline.orchestration.partitions import ExperimentAssets, planned_keys
from magic_pipeline.orchestration.progress import RunProgress
from magic_pipeline.orchestration.provenance import provenance

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment
    from magic_pipeline.attribution.status import QueryStatus


def segments_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Walks the run's queries back through training, from wherever each was sealed last."""
    assets = ExperimentAssets.of(experiment)

    @dg.asset(
        key=assets.segments,
        group_name=experiment.name,
        description=(
            "Each query's gradient, walked back through the whole training run and sealed segment by segment. A "
            "materialized partition is a complete walk. Interrupted, a walk goes on from its last sealed segment; "
            "finished queries are never walked again."
        ),
        deps=[assets.trajectory, assets.training_data, assets.queries],
        partitions_def=assets.by_query_and_rank(),
        backfill_policy=dg.BackfillPolicy.single_run(),
        output_required=False,
        kinds={"pytorch"},
        pool=GPU_POOL,
        code_version=walk_code_version(experiment),
    )
    def segment_checkpoints(context: dg.AssetExecutionContext, config: WalkSettings) -> Iterator[Any]:
        with operating(context):
            planned = _ranks_by_query(planned_keys(context))
            _Gang(context, assets, opened_once(config.applied_to(experiment)), planned).run()
        yield from ()

    return segment_checkpoints


def _ranks_by_query(partitions: Sequence[str]) -> dict[str, list[str]]:
    planned: dict[str, list[str]] = {}
    for partition in partitions:
        # Dagster names both dimensions in one key, in the alphabetical order of the dimensions.
        query, rank = partition.rsplit("|", 1)
        planned.setdefault(query, []).append(rank)
    return planned


class _Gang:
    """One run's walk over its queries. `planned` maps each query key to the ranks that this run has to report."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        assets: ExperimentAssets,
        opened: "OpenExperiment",
        planned: dict[str, list[str]],
    ) -> None:
        self.context, self.assets, self.opened, self.planned = context, assets, opened, planned
        self.progress = RunProgress(context)
        self.unreported = dict.fromkeys(query.key for query in opened.queries if query.key in planned)
        self.provenance = provenance(opened)
        self.sources_of = observe_sources(context, assets, opened, list(self.unreported))

    def run(self) -> None:
        """Report what is complete, walk the rest, report each query as it completes.

        Raises:
            InputError: a partition's query is no longer in the experiment; raised after the others are done.
        """
        self._report_complete()
        since = time.monotonic()
        limit = stall_limit(self.opened.experiment)
        with deferred_interrupts() as should_stop, self.progress.watched(end_seconds=limit):
            while self.unreported:
                try:
                    self._walk(should_stop)
                except HeldError as error:
                    # Another run has the query: wait for it to finish, or to die, and see again what is left to do.
                    wait_while_held(error, since=since, should_stop=should_stop)
                    self.progress.moved()
                    if should_stop():
                        raise InterruptedWalkError("stopped while waiting for another process") from error
                self._report_complete()
        unknown = [key for key in self.planned if key not in {query.key for query in self.opened.queries}]
        if unknown:
            shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            raise InputError(
                f"the experiment has no query for the partitions {shown}; delete them, or bring the queries back",
                field="queries",
            )

    def _walk(self, should_stop: Any) -> None:
        from magic_pipeline.attribution.gang import walk_together
        from magic_pipeline.attribution.status import holder_of

        free = [key for key in self.unreported if holder_of(self.opened, key) is None]
        # With every query held, the walk says by whom.
        walk_together(self.opened, free or list(self.unreported), observe=self._observe, should_stop=should_stop)

    def _observe(self, event: Event) -> None:
        self.progress(event)
        if isinstance(event, QueryComplete) and event.key in self.unreported:
            # Reported now and not at the end, so that it stays reported whatever happens to the others.
            self._report_complete([event.key], walked=True)

    def _report_complete(self, keys: Sequence[str] | None = None, *, walked: bool = False) -> None:
        from magic_pipeline.attribution.status import query_statuses, trajectory_status

        wanted = list(self.unreported) if keys is None else keys
        if not wanted:
            return
        trajectory = trajectory_status(self.opened).digest
        for status in query_statuses(self.opened, wanted):
            if not status.complete or status.walk_digest is None:
                continue
            made_from = [Input(self.assets.trajectory, trajectory or "unknown"), *self.sources_of(status.key)]
            log_partitions(
                self.context,
                [self.assets.segment_key(status.key, rank) for rank in self.planned[status.key]],
                version=status.walk_digest,
                made_from=made_from,
                metadata=self._metadata(status, walked) | {"trajectory_digest": trajectory},
                reported_again=not walked,
            )
            del self.unreported[status.key]

    def _metadata(self, status: "QueryStatus", walked: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "query": status.id,
            "query_digest": status.digest,
            "segments": status.segments,
            **self.provenance,
            "stored_in": f"{self.opened.store.url}/{self.opened.layout.query(status.key, status.digest)}",
        }
        return metadata | (self.progress.metadata() if walked else {})
