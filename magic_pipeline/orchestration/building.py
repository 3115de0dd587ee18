"""The Definitions of a folder of experiments. Loading them imports no torch and reads nothing but the experiment
files."""

# No postponed annotations here: Dagster compares the annotation of `context` itself.

import re
import warnings
from pathlib import Path

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from magic_pipeline.attribution.experiment import Experiment, load_experiment, load_experiments
from magic_pipeline.errors import InputError
from magic_pipeline.orchestration.failures import failure, one_line
from magic_pipeline.orchestration.inputs_assets import inputs_assets, inputs_sensor, observe_job
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.queries_sensor import nightly_schedule, queries_sensor
from magic_pipeline.orchestration.scores_assets import matrix_asset, scores_asset
from magic_pipeline.orchestration.segments_asset import segments_asset
from magic_pipeline.orchestration.trajectory_asset import trajectory_asset
from magic_pipeline.orchestration.validation_assets import validation_assets

INVALID_GROUP = "invalid_experiments"


def build_definitions(
    path: Path,
    *,
    executor: dg.ExecutorDefinition | None = dg.in_process_executor,
    read: Experiment | None = None,
) -> dg.Definitions:
    """One asset group per valid experiment file of a folder (or for the one file), and per wrong file an asset that shows the error.

    Args:
        executor: of runs that are launched without a job of ours. In one process, a killed run leaves no step process behind that
            goes on computing; None where the project that these become a part of has its own.
        read: an experiment of the folder that was read before: its file may have been edited since, and is not read again.
    """
    assets: list[dg.AssetsDefinition] = []
    jobs: list[UnresolvedAssetJobDefinition] = []
    sensors: list[dg.SensorDefinition] = []
    schedules: list[dg.ScheduleDefinition] = []
    for file, found in _experiments(path, read).items():
        if isinstance(found, InputError):
            assets.append(invalid_experiment_asset(file, found))
        else:
            assets += experiment_assets(found)
            own = experiment_jobs(found)
            observe = observe_job(found)
            jobs += [*own, observe]
            sensors += [queries_sensor(found, own), inputs_sensor(found, observe)]
            schedules.append(nightly_schedule(found, own))
    return dg.Definitions(assets=assets, jobs=jobs, sensors=sensors, schedules=schedules, executor=executor)


def _experiments(path: Path, read: Experiment | None) -> dict[Path, Experiment | InputError]:
    if not path.is_file():
        before = None if read is None or read.path is None else read.path.absolute()
        found = load_experiments(path)
        return {file: read if read is not None and file.absolute() == before else one for file, one in found.items()}
    try:
        return {path: load_experiment(path)}
    except InputError as error:
        return {path: error}


def experiment_assets(experiment: Experiment) -> list[dg.AssetsDefinition]:
    """The experiment's assets, upstream first."""
    with warnings.catch_warnings():
        # Dagster calls its backfill policies beta; the range of versions that this project takes has them.
        warnings.filterwarnings("ignore", "Parameter `backfill_policy`", dg.BetaWarning)
        warnings.filterwarnings("ignore", "Function `multi_observable_source_asset`", dg.BetaWarning)
        made = [build(experiment) for build in (trajectory_asset, segments_asset, scores_asset, matrix_asset)]
        return [*inputs_assets(experiment), *made, *validation_assets(experiment)]


def experiment_jobs(experiment: Experiment) -> list[UnresolvedAssetJobDefinition]:
    """A job per asset. Dagster refuses one over differently partitioned assets, and in one over others skips what comes after
    an asset that reports its partitions one by one."""
    assets = ExperimentAssets.of(experiment)
    name = experiment.name
    selections = {
        f"{name}_train": ([assets.trajectory], "Train, or go on training."),
        f"{name}_attribute": ([assets.segments], "Walk queries back through the training run."),
        f"{name}_score": ([assets.scores], "Write the scores of walked queries."),
        f"{name}_collect": ([assets.matrix], "Collect the scores of all queries."),
    }
    section = experiment.validation
    if section.lds is not None:
        selections[f"{name}_retrain"] = ([assets.subsets], "Retrain without random subsets.")
        selections[f"{name}_validate"] = ([assets.lds], "Compare what retraining did with what the scores say.")
    if section.removal is not None:
        selections[f"{name}_remove"] = ([assets.removal], "Retrain without the most helpful examples.")
    if section.derivative is not None:
        selections[f"{name}_derivative"] = ([assets.derivative], "Compare the scores with two trainings.")
    if section.smoothness is not None:
        selections[f"{name}_smoothness"] = ([assets.smoothness], "Measure whether training is smooth.")
    return [
        dg.define_asset_job(
            job,
            selection=dg.AssetSelection.assets(*keys),
            description=description,
            executor_def=dg.in_process_executor,
        )
        for job, (keys, description) in selections.items()
    ]


def invalid_experiment_asset(path: Path, error: InputError) -> dg.AssetsDefinition:
    """An asset that stands for a file that is wrong: its description is the error, and materializing it fails with
    it."""
    stem = re.sub(r"[^A-Za-z0-9_]", "_", path.name)

    @dg.asset(
        key=dg.AssetKey([INVALID_GROUP, stem]),
        group_name=INVALID_GROUP,
        description=one_line(error),
        metadata={"experiment_file": dg.MetadataValue.path(str(path.absolute()))},
    )
    def invalid_experiment(context: dg.AssetExecutionContext) -> None:
        raise failure(error)

    return invalid_experiment
