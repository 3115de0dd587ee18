"""The asset `training_trajectory`: the states at segment boundaries and the final state, sealed in the store."""

# No postponed annotations here: Dagster compares the annotation of `context` itself.

import logging
import time
from typing import TYPE_CHECKING, Any

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.errors import HeldError, InterruptedWalkError
from magic_pipeline.orchestration.asset_versions import experiment_metadata, training_code_version
from magic_pipeline.orchestration.inputs_assets import open_and_observe
from magic_pipeline.orchestration.instance import GPU_POOL
from magic_pipeline.orchestration.interrupts import deferred_interrupts
from magic_pipeline.orchestration.launch_settings import TrainingSettings
from magic_pipeline.orchestration.operating import operating, stall_limit, wait_while_held
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.progress import RunProgress
from magic_pipeline.orchestration.provenance import provenance
from magic_pipeline.orchestration.runs_of_experiment import sync_query_keys
from magic_pipeline.orchestration.score_metadata import chart_metadata

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment
    from magic_pipeline.attribution.trajectory import Trajectory

logger = logging.getLogger("magic_pipeline.orchestration")


def trajectory_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Trains, or goes on training, or reports again what is finished; then makes the queries partitions."""
    assets = ExperimentAssets.of(experiment)

    @dg.asset(
        key=assets.trajectory,
        group_name=experiment.name,
        description=(
            "The training run: its states at segment boundaries and its final state, sealed in the storage. "
            "Materialize it first; the queries then appear as partitions of the assets downstream. Interrupted, it "
            "goes on from the last sealed boundary."
        ),
        metadata=experiment_metadata(experiment),
        deps=[assets.training_data],
        kinds={"pytorch"},
        pool=GPU_POOL,
        code_version=training_code_version(experiment),
    )
    def training_trajectory(context: dg.AssetExecutionContext, config: TrainingSettings) -> dg.MaterializeResult[Any]:
        with operating(context):
            opened = open_and_observe(context, assets, config.applied_to(experiment))
            progress, origin = RunProgress(context), provenance(opened)  # before hours in which files change
            trajectory = _train(opened, progress, make_freed_states=config.make_freed_states)
            added, removed = sync_query_keys(context.instance, assets, [query.key for query in opened.queries])
            if added or removed:
                where = assets.segments.to_user_string()
                logger.info("partitions of %s: %d new, %d of queries no longer asked", where, len(added), len(removed))
            return dg.MaterializeResult(
                data_version=dg.DataVersion(trajectory.digest),
                metadata=_metadata(opened, trajectory, progress, origin),
            )

    return training_trajectory


def _train(opened: "OpenExperiment", progress: RunProgress, *, make_freed_states: bool) -> "Trajectory":
    from magic_pipeline.attribution.describing import describe
    from magic_pipeline.attribution.gang import train_together
    from magic_pipeline.attribution.trajectory import sealed_trajectory

    finished = None if make_freed_states else sealed_trajectory(opened)
    if finished is not None:
        describe(opened)
        return finished
    since = time.monotonic()
    limit = stall_limit(opened.experiment)
    with deferred_interrupts() as should_stop, progress.watched(end_seconds=limit):
        while True:
            try:
                trajectory = train_together(opened, observe=progress, should_stop=should_stop)
                break
            except HeldError as error:
                wait_while_held(error, since=since, should_stop=should_stop)
                progress.moved()
                if should_stop():
                    raise InterruptedWalkError("stopped while waiting for another process") from error
    describe(opened)
    return trajectory


def _metadata(
    opened: "OpenExperiment", trajectory: "Trajectory", progress: RunProgress, origin: dict[str, Any]
) -> dict[str, Any]:
    from magic_pipeline.reporting.charts import loss_chart

    made = trajectory.steps - trajectory.resumed_from
    metadata: dict[str, Any] = {
        "reported_again": made == 0,
        "steps": trajectory.steps,
        "segments": len(trajectory.boundaries) - 1,
        "final_loss": float(trajectory.losses[-1]),
        "examples": len(opened.dataset),
        "queries": len(opened.queries),
        "stored_in": f"{opened.store.url}/{opened.folder}",
        **origin,
        "versions": dg.MetadataValue.json(dict(trajectory.versions)),
    }
    metadata |= chart_metadata("loss_curve", lambda: loss_chart(trajectory.losses), "the loss of every training step")
    if made:
        metadata["resumed_from_step"] = trajectory.resumed_from
    elif progress.steps:
        metadata["states_made_again"] = progress.checkpoints
    if made or progress.steps:
        metadata |= progress.metadata()
    return metadata
