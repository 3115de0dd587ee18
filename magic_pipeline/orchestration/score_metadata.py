"""What a query's scores show in the UI and in the terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dagster as dg

from magic_pipeline.errors import InputError

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment
    from magic_pipeline.attribution.score_table import ScoreTable
    from magic_pipeline.attribution.scores import ScoreSheet

logger = logging.getLogger("magic_pipeline.orchestration")


def score_metadata(opened: OpenExperiment, sheet: ScoreSheet, table: ScoreTable) -> dict[str, Any]:
    """The table of the top examples, a plot, row count, digests, versions and where the file is."""
    from magic_pipeline.attribution.score_table import SIGN_CONVENTION

    return {
        "query": sheet.id,
        **_top_examples(opened, sheet.key),
        **_charts(opened, table),
        "dagster/row_count": sheet.rows,
        "lowest_score": float(table.scores.min()),
        "highest_score": float(table.scores.max()),
        "sign_convention": SIGN_CONVENTION,
        "file": f"{opened.store.url}/{sheet.path}",
        "digest": sheet.digest,
        "walk_digest": sheet.walk_digest,
        "trajectory_digest": table.facts.trajectory_digest,
        "walked_with": dg.MetadataValue.json(dict(table.facts.versions)),
    }


def chart_metadata(name: str, make: Callable[[], bytes], alt: str) -> dict[str, Any]:
    """A chart for the UI; nothing without the extra `reports`, for nothing fails for want of a picture."""
    from magic_pipeline.reporting.tables import markdown_image

    try:
        return {name: dg.MetadataValue.md(markdown_image(make(), alt))}
    except InputError as error:
        logger.warning("no picture: %s", error)
        return {}


def costs_metadata(opened: OpenExperiment) -> dict[str, Any]:
    """What everything has cost so far, as a table."""
    from magic_pipeline.attribution.costs import costs
    from magic_pipeline.reporting.tables import costs_table

    return {"costs": dg.MetadataValue.md(costs_table(costs(opened)))}


def terminal_report(opened: OpenExperiment, key: str) -> str:
    """The table of a query's top examples for a terminal."""
    from magic_pipeline.reporting.of_experiment import query_top_examples
    from magic_pipeline.reporting.tables import terminal_table

    return terminal_table(query_top_examples(opened, key, count=5, rendered=False))


def _charts(opened: OpenExperiment, table: ScoreTable) -> dict[str, Any]:
    from magic_pipeline.reporting.charts import distribution_chart, steps_chart
    from magic_pipeline.reporting.of_experiment import last_steps

    def by_step() -> bytes:
        return steps_chart(last_steps(opened), table.scores)

    return {
        **chart_metadata("distribution", lambda: distribution_chart(table.scores), "distribution of the scores"),
        **chart_metadata("scores_by_step", by_step, "scores against the last step that used the example"),
    }


def _top_examples(opened: OpenExperiment, key: str) -> dict[str, Any]:
    """The table and the plot; without the extra `reports`, the table of ids alone, for scores do not fail for want of a picture."""
    from magic_pipeline.reporting.figures import query_figure
    from magic_pipeline.reporting.of_experiment import query_top_examples
    from magic_pipeline.reporting.tables import markdown_image, markdown_table

    try:
        top = query_top_examples(opened, key)
        # Five a side: wider figures do not fit the UI's dialog.
        plot = markdown_image(query_figure(query_top_examples(opened, key, count=5)), f"top examples of {top.query_id}")
        return {"top_examples": dg.MetadataValue.md(markdown_table(top)), "plot": dg.MetadataValue.md(plot)}
    except InputError as error:
        logger.warning("no pictures: %s", error)
        top = query_top_examples(opened, key, rendered=False)
        return {"top_examples": dg.MetadataValue.md(markdown_table(top))}
