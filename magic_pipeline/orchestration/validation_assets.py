"""The assets of an experiment's `validation:` section: `retrained_subsets` (partitioned by subset), `linear_datamodeling_score`,
`removal_curves`, `directional_derivative` and `metasmoothness`. Each is there only if the section asks for it."""

# No postponed annotations here: Dagster compares the annotation of `context` itself.

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from magic_pipeline.attribution.bank import subset_labels
from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.observing import Event, RetrainingsComplete
from magic_pipeline.errors import HeldError, InputError, InterruptedWalkError
from magic_pipeline.orchestration.asset_versions import validation_code_version
from magic_pipeline.orchestration.checks import derivative_check, derivative_result, lds_check, lds_result
from magic_pipeline.orchestration.inputs_assets import observe_training_data, open_and_observe
from magic_pipeline.orchestration.instance import GPU_POOL
from magic_pipeline.orchestration.interrupts import deferred_interrupts
from magic_pipeline.orchestration.materializations import Input, log_partitions
from magic_pipeline.orchestration.operating import opened_once, operating, wait_while_held
from magic_pipeline.orchestration.partitions import ExperimentAssets, planned_keys
from magic_pipeline.orchestration.progress import RunProgress
from magic_pipeline.orchestration.score_metadata import chart_metadata

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment
    from magic_pipeline.attribution.validation import Report


def subset_keys(experiment: Experiment) -> list[str]:
    """The partitions of `retrained_subsets`: every subset of every drop fraction."""
    lds = experiment.validation.lds
    if lds is None:
        return []
    return [label for fraction in lds.drop_fraction for label in subset_labels(fraction, lds.subsets)]


def validation_assets(experiment: Experiment) -> list[dg.AssetsDefinition]:
    """What the section asks for."""
    section, found = experiment.validation, list[dg.AssetsDefinition]()
    if section.lds is not None:
        found += [subsets_asset(experiment), lds_asset(experiment)]
    if section.removal is not None:
        found.append(removal_asset(experiment))
    if section.derivative is not None:
        found.append(derivative_asset(experiment))
    if section.smoothness is not None:
        found.append(smoothness_asset(experiment))
    return found


def subsets_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Retrains without random subsets, block by block; reports each as soon as its block is sealed."""
    assets = ExperimentAssets.of(experiment)

    @dg.asset(
        key=assets.subsets,
        group_name=experiment.name,
        description=(
            "The model trained again, in the same order, without a random subset of the examples: one partition a subset. "
            "Interrupted, it goes on; finished retrainings are never made again."
        ),
        deps=[assets.trajectory, assets.training_data],
        partitions_def=dg.StaticPartitionsDefinition(subset_keys(experiment)),
        backfill_policy=dg.BackfillPolicy.single_run(),
        output_required=False,
        kinds={"pytorch"},
        pool=GPU_POOL,
        code_version=validation_code_version(experiment, "lds"),
    )
    def retrained_subsets(context: dg.AssetExecutionContext) -> Iterator[Any]:
        with operating(context):
            _Subsets(context, assets, opened_once(experiment), list(planned_keys(context))).run()
        yield from ()

    return retrained_subsets


class _Subsets:
    """One run over the subsets of `planned`."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        assets: ExperimentAssets,
        opened: "OpenExperiment",
        planned: list[str],
    ) -> None:
        self.context, self.assets, self.opened = context, assets, opened
        self.progress, self.unreported = RunProgress(context), dict.fromkeys(planned)
        self.data = observe_training_data(context, assets, opened)

    def run(self) -> None:
        from magic_pipeline.attribution.validation import retrain_subsets

        self._report(again=True)

        def work(should_stop: Callable[[], bool]) -> None:
            retrain_subsets(self.opened, list(self.unreported), observe=self._observe, should_stop=should_stop)

        if self.unreported:
            _while_held(self.opened, self.progress, work)
        self._report(again=True)
        if self.unreported:
            raise InputError(
                f"the experiment has no subset {next(iter(self.unreported))}; its partitions follow its file",
                field="validation",
            )

    def _observe(self, event: Event) -> None:
        self.progress(event)
        if isinstance(event, RetrainingsComplete):
            self._report(again=False)

    def _report(self, *, again: bool) -> None:
        from magic_pipeline.attribution.status import trajectory_status
        from magic_pipeline.attribution.validation import finished_subsets

        trajectory = Input(self.assets.trajectory, trajectory_status(self.opened).digest or "unknown")
        for label, run in finished_subsets(self.opened).items():
            if label not in self.unreported:
                continue
            diverged = {} if run.result.diverged_at is None else {"diverged_at_step": run.result.diverged_at}
            metadata = {"subset": label, "weights_digest": run.result.digest, **diverged}
            if not again:
                metadata |= self.progress.metadata()
            log_partitions(
                self.context,
                [label],
                version=run.digest,
                made_from=[trajectory, self.data],
                metadata=metadata | {"measurements": dict(list(run.result.measurements.items())[:20])},
                reported_again=again,
            )
            del self.unreported[label]


def lds_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Compares predicted with true changes of every finished query."""
    assets, lds = ExperimentAssets.of(experiment), experiment.validation.lds
    bound = -1.0 if lds is None else lds.bound

    @dg.asset(
        key=assets.lds,
        group_name=experiment.name,
        description=(
            "The linear datamodeling score: per query, how well the scores rank what retraining on random subsets does "
            "(Spearman), with bootstrap intervals over the subsets; Pearson and slope for the magnitudes."
        ),
        deps=[assets.subsets, assets.matrix, assets.training_data],
        code_version=validation_code_version(experiment, "lds"),
        check_specs=[lds_check(assets.lds)],
    )
    def linear_datamodeling_score(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster compares it
        from magic_pipeline.attribution.linear_datamodeling import LinearDatamodelingScore
        from magic_pipeline.attribution.validation import write_lds
        from magic_pipeline.attribution.validation_tables import lds_markdown, summary
        from magic_pipeline.reporting.charts import prediction_chart

        with operating(context):
            opened = open_and_observe(context, assets, experiment)
            report = write_lds(opened)
            tables = [LinearDatamodelingScore.from_dict(table) for table in report.content]
            numbers: dict[str, Any] = {}
            for table in tables:
                name = f"drop_{table.drop_fraction:g}"
                chart = functools.partial(prediction_chart, table.predicted, table.actual)
                if table.subsets:
                    numbers |= chart_metadata(
                        f"{name}_chart", chart, f"true against predicted changes, {summary(table)}"
                    )
                numbers[f"{name}_subsets"] = f"{table.subsets} of {table.of}"
                numbers[f"{name}_undefined_queries"] = table.undefined
                if table.defined:
                    numbers |= {f"{name}_mean_lds": table.mean, f"{name}_low": table.low, f"{name}_high": table.high}
            return _result(
                opened,
                report,
                {
                    "summary": "\n".join(map(summary, tables)),
                    "table": dg.MetadataValue.md(lds_markdown(tables)),
                    **numbers,
                },
                lds_result(tables, bound),
            )

    return linear_datamodeling_score


def removal_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Retrains without each query's most helpful examples."""
    assets = ExperimentAssets.of(experiment)

    @dg.asset(
        key=assets.removal,
        group_name=experiment.name,
        description="Each query after training without its k most helpful examples, against k random ones.",
        deps=[assets.matrix, assets.training_data],
        kinds={"pytorch"},
        pool=GPU_POOL,
        code_version=validation_code_version(experiment, "removal"),
    )
    def removal_curves(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        from magic_pipeline.attribution.validation import write_removal_curves
        from magic_pipeline.attribution.validation_tables import removal_lines

        with operating(context):
            opened = open_and_observe(context, assets, experiment)
            report = _worked(opened, RunProgress(context), lambda **keywords: write_removal_curves(opened, **keywords))
            lines = "\n".join(removal_lines(report.content))
            return _result(opened, report, {"table": dg.MetadataValue.md(f"```\n{lines}\n```")})

    return removal_curves


def derivative_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Trains twice with the data weights moved along a random direction, and compares with the scores."""
    assets = ExperimentAssets.of(experiment)

    @dg.asset(
        key=assets.derivative,
        group_name=experiment.name,
        description="The scores against two trainings with the weights moved along a random direction: a cheap check of exactness.",
        deps=[assets.matrix, assets.training_data],
        kinds={"pytorch"},
        pool=GPU_POOL,
        code_version=validation_code_version(experiment, "derivative"),
        check_specs=[derivative_check(assets.derivative)],
    )
    def directional_derivative(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster compares it
        from magic_pipeline.attribution.validation import write_directional_derivative
        from magic_pipeline.attribution.validation_tables import derivative_lines

        with operating(context):
            opened = open_and_observe(context, assets, experiment)
            report = _worked(
                opened, RunProgress(context), lambda **keywords: write_directional_derivative(opened, **keywords)
            )
            lines = "\n".join(derivative_lines(report.content))
            metadata = {"table": dg.MetadataValue.md(f"```\n{lines}\n```")}
            return _result(opened, report, metadata, derivative_result(report.content))

    return directional_derivative


def smoothness_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Trains with the data weights moved by 0, h and 2h. It needs nothing, so it can be asked before anything else."""
    assets = ExperimentAssets.of(experiment)

    @dg.asset(
        key=assets.smoothness,
        group_name=experiment.name,
        deps=[assets.training_data],
        description="Whether training answers steadily to the data weights (metasmoothness); scores predict only then.",
        kinds={"pytorch"},
        pool=GPU_POOL,
        code_version=validation_code_version(experiment, "smoothness"),
    )
    def metasmoothness(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        from magic_pipeline.attribution.validation import write_metasmoothness
        from magic_pipeline.attribution.validation_tables import smoothness_line

        with operating(context):
            opened = open_and_observe(context, assets, experiment)
            report = _worked(opened, RunProgress(context), lambda **keywords: write_metasmoothness(opened, **keywords))
            mean = report.content["mean"]
            number = {} if mean is None else {"metasmoothness": mean}
            return _result(opened, report, {"summary": smoothness_line(report.content), **number})

    return metasmoothness


def _result(
    opened: "OpenExperiment", report: "Report", metadata: dict[str, Any], *checks: dg.AssetCheckResult
) -> dg.MaterializeResult[Any]:
    facts = {
        "reported_again": report.found,
        "digest": report.digest,
        "fingerprint": opened.fingerprint,
        "files": [f"{opened.store.url}/{path}" for path in report.paths],
    }
    version = dg.DataVersion(report.digest)
    return dg.MaterializeResult(data_version=version, metadata=metadata | facts, check_results=list(checks))


def _worked(opened: "OpenExperiment", progress: RunProgress, write: "Callable[..., Report]") -> "Report":
    """The report, after waiting for whoever holds a block of its bank."""
    made: list[Report] = []
    _while_held(opened, progress, lambda should_stop: made.append(write(observe=progress, should_stop=should_stop)))
    return made[0]


def _while_held(opened: "OpenExperiment", progress: RunProgress, work: Callable[[Callable[[], bool]], None]) -> None:
    """Works until it is done; a live process that holds a part is waited for."""
    since = time.monotonic()
    limit = 60 * opened.experiment.attribution.stall_timeout_minutes  # retraining is one process's work
    with deferred_interrupts() as should_stop, progress.watched(end_seconds=limit):
        while True:
            try:
                work(should_stop)
                return
            except HeldError as error:
                wait_while_held(error, since=since, should_stop=should_stop)
                progress.moved()
                if should_stop():
                    raise InterruptedWalkError("stopped while waiting for another process") from error
