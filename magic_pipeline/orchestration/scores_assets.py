"""The assets `attribution_scores`, one Parquet sheet a query, and `score_matrix`, all queries in one dataset."""

# No postponed annotations here: Dagster compares the annotation of `context` itself.

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.errors import InputError, MagicError
from magic_pipeline.orchestration.asset_versions import report_code_version
from magic_pipeline.orchestration.automation import when_inputs_are_complete
from magic_pipeline.orchestration.checks import matrix_checks, matrix_results
from magic_pipeline.orchestration.inputs_assets import observe_sources, open_and_observe
from magic_pipeline.orchestration.materializations import Input, log_partitions
from magic_pipeline.orchestration.operating import opened_once, operating
from magic_pipeline.orchestration.partitions import ExperimentAssets, planned_keys
from magic_pipeline.orchestration.provenance import provenance
from magic_pipeline.orchestration.score_metadata import costs_metadata, score_metadata

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment


def scores_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Writes each query's scores, with the table of its top examples and a plot; reports again what is written
    already."""
    assets = ExperimentAssets.of(experiment)

    @dg.asset(
        key=assets.scores,
        group_name=experiment.name,
        description=(
            "The score of every training example for a query: how the query's measurement changes with the example's "
            "weight. Negative: the example helps (more of it lowers the measured loss). One Parquet file a query."
        ),
        deps=[assets.segments, assets.training_data, assets.queries],
        partitions_def=assets.by_query(),
        backfill_policy=dg.BackfillPolicy.single_run(),
        output_required=False,
        automation_condition=when_inputs_are_complete(assets.segments),
        kinds={"parquet"},
        code_version=report_code_version(experiment),
    )
    def attribution_scores(context: dg.AssetExecutionContext) -> Iterator[Any]:
        with operating(context):
            opened = opened_once(experiment)
            keys = planned_keys(context)
            sources_of = observe_sources(context, assets, opened, keys)
            reports = (_report_scores(context, assets, opened, key, sources_of) for key in keys)
            errors = [error for error in reports if error is not None]
            if errors:
                # Raised after all the others are reported: one query's trouble is no other query's.
                raise errors[0]
        yield from ()

    return attribution_scores


def _report_scores(
    context: dg.AssetExecutionContext,
    assets: ExperimentAssets,
    opened: "OpenExperiment",
    key: str,
    sources_of: Callable[[str], list[Input]],
) -> MagicError | None:
    """Write or find one query's sheet and report it; the error if its walk is not complete or it is no query any
    more."""
    from magic_pipeline.attribution.scores import read_scores, write_scores
    from magic_pipeline.attribution.status import query_statuses

    try:
        query = opened.query(key)
    except InputError as error:
        return error
    (status,) = query_statuses(opened, [key])
    if status.walk_digest is None:
        where = assets.segments.to_user_string()
        return MagicError(
            f"query {query.id!r}: its walk is not complete; materialize its partition {key} of {where} first"
        )
    again = status.scores_digest is not None
    # Writing again what is written already returns it.
    sheet = write_scores(opened, key)
    log_partitions(
        context,
        [key],
        version=sheet.digest,
        made_from=[
            Input(assets.segments, status.walk_digest, assets.segment_key(key, assets.rank_keys[0])),
            *sources_of(key),
        ],
        metadata=score_metadata(opened, sheet, read_scores(opened, key)) | provenance(opened),
        reported_again=again,
    )
    return None


def matrix_asset(experiment: Experiment) -> dg.AssetsDefinition:
    """Collects the scores of all queries that have them."""
    assets = ExperimentAssets.of(experiment)

    @dg.asset(
        key=assets.matrix,
        group_name=experiment.name,
        description="The scores of all finished queries in one dataset: a row per example, a column per query.",
        deps=[assets.scores, assets.training_data, assets.queries],
        automation_condition=when_inputs_are_complete(assets.scores),
        kinds={"parquet"},
        code_version=report_code_version(experiment),
        check_specs=matrix_checks(assets.matrix),
    )
    def score_matrix(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster compares it
        from magic_pipeline.attribution.scores import read_matrix, write_score_matrix
        from magic_pipeline.attribution.status import matrix_digest

        with operating(context):
            opened = open_and_observe(context, assets, experiment)
            before = matrix_digest(opened)
            sheet = write_score_matrix(opened)
            return dg.MaterializeResult(
                data_version=dg.DataVersion(sheet.digest),
                check_results=matrix_results(read_matrix(opened), [query.id for query in opened.queries]),
                metadata={
                    "reported_again": before == sheet.digest,
                    "dagster/row_count": sheet.rows,
                    "queries": sheet.columns,
                    "queries_of_experiment": len(opened.queries),
                    "file": f"{opened.store.url}/{sheet.path}",
                    "digest": sheet.digest,
                    **provenance(opened),
                    **costs_metadata(opened),
                },
            )

    return score_matrix
