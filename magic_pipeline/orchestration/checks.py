"""The asset checks of an experiment: what has to hold of scores before anybody acts on them. Each comes with its asset's own run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from magic_pipeline.attribution.linear_datamodeling import LinearDatamodelingScore
    from magic_pipeline.attribution.score_matrix import ScoreMatrix

FINITE, DIFFER, COMPLETE, AGREE, BOUND = (
    "scores_are_finite",
    "scores_differ",
    "all_queries_have_scores",
    "scores_agree_with_training",
    "lds_is_above_its_bound",
)
_SHOWN = 10


def matrix_checks(key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """Of the score matrix. What is not finite blocks everything downstream."""
    return [
        dg.AssetCheckSpec(FINITE, asset=key, blocking=True, description="Every score is a finite number."),
        dg.AssetCheckSpec(
            DIFFER,
            asset=key,
            description="No query has the same score for all examples: it would say nothing, and has no correlation.",
        ),
        dg.AssetCheckSpec(COMPLETE, asset=key, description="Every query of the experiment is in the matrix."),
    ]


def matrix_results(matrix: ScoreMatrix, queries: Iterable[str]) -> list[dg.AssetCheckResult]:
    """Of a matrix as it was read back, and the ids of all queries of the experiment."""
    import numpy as np

    ids = matrix.query_ids
    wrong = [id_ for at, id_ in enumerate(ids) if not np.isfinite(matrix.scores[:, at]).all()]
    constant = [id_ for at, id_ in enumerate(ids) if len(matrix.ids) > 1 and np.ptp(matrix.scores[:, at]) == 0]
    missing = [id_ for id_ in queries if id_ not in ids]
    return [
        _result(FINITE, wrong),
        _result(DIFFER, constant, dg.AssetCheckSeverity.WARN),
        _result(COMPLETE, missing, dg.AssetCheckSeverity.WARN),
    ]


def derivative_check(key: dg.AssetKey) -> dg.AssetCheckSpec:
    """Of the scores against two trainings."""
    why = "Along a random direction the scores of each query are the derivative that two trainings show."
    return dg.AssetCheckSpec(AGREE, asset=key, blocking=True, description=why)


def derivative_result(content: dict[str, Any]) -> dg.AssetCheckResult:
    """Of the sealed report of `directional_derivative`."""
    rows, tolerance = content["queries"], content["tolerance"]
    wrong = [row["query"] for row in rows if row["error"] is None or row["error"] > tolerance]
    worst = {} if content["worst"] is None else {"worst_relative_error": content["worst"]}
    return _result(AGREE, wrong, facts={"tolerance": tolerance, **worst})


def lds_check(key: dg.AssetKey) -> dg.AssetCheckSpec:
    """Of the linear datamodeling score; a warning, for exact scores of a training that is not smooth are exact too."""
    return dg.AssetCheckSpec(BOUND, asset=key, description="The mean LDS of every drop fraction is above its bound.")


def lds_result(tables: Sequence[LinearDatamodelingScore], bound: float) -> dg.AssetCheckResult:
    """Of the tables of all drop fractions; one without a number is not above anything."""
    low = [f"drop {table.drop_fraction:g}" for table in tables if not (table.defined and table.mean >= bound)]
    means = {f"drop_{table.drop_fraction:g}_mean_lds": table.mean for table in tables if table.defined}
    return _result(BOUND, low, dg.AssetCheckSeverity.WARN, {"bound": bound, **means})


def _result(
    name: str,
    failing: Sequence[str],
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    facts: dict[str, Any] | None = None,
) -> dg.AssetCheckResult:
    shown = ", ".join(failing[:_SHOWN]) + (f" and {len(failing) - _SHOWN} more" if len(failing) > _SHOWN else "")
    metadata: dict[str, Any] = {"failing": len(failing), **({"which": shown} if failing else {}), **(facts or {})}
    return dg.AssetCheckResult(passed=not failing, check_name=name, severity=severity, metadata=metadata)
