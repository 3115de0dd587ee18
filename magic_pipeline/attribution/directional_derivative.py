"""A cheap check that scores are exact: their derivative along a random direction against two trainings that are moved along it.

With signs `v_i` of +1 and -1 drawn at random, `sum_i v_i score[i, q] = d phi_q / d c` for data weights `w_i = 1 + c v_i` at c = 0, and
the right side is a central difference of two trainings, c = h and c = -h. A wrong pullback, a forgotten step or a doubled unit
shows. (Moved all alike, weights would say little: Adam hardly sees the scale of its gradients.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magic_pipeline.attribution.bank import Bank, Reweighting
from magic_pipeline.attribution.experiment_settings import DerivativeSettings
from magic_pipeline.attribution.linear_datamodeling import RunResult, refuse_duplicates_and_strangers

MORE, LESS = "more", "less"


@dataclass(frozen=True)
class QueryDerivative:
    """One query's row: what the scores say and what two trainings say.

    `error` is the difference of both relative to the largest of them and of the scores; None where a training did not stay finite.
    """

    query: str
    predicted: float
    difference: float | None
    error: float | None


@dataclass(frozen=True)
class DirectionalDerivative:
    """The table; `holds` where every query's error is within the tolerance."""

    h: float
    tolerance: float
    queries: tuple[QueryDerivative, ...]

    @property
    def worst(self) -> float | None:
        """The largest error; None where one is not defined."""
        errors = [row.error for row in self.queries]
        return None if None in errors else max(error for error in errors if error is not None)

    @property
    def holds(self) -> bool:
        return self.worst is not None and self.worst <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"worst": self.worst, "holds": self.holds}


def derivative_bank(training: str, units: int, settings: DerivativeSettings) -> Bank:
    """The two trainings: the weights moved by h along random signs, and against them."""
    everything, signs = np.arange(units, dtype=np.int64), _signs(units, settings)
    runs = tuple(
        Reweighting(label, everything, 1 + c * signs) for label, c in ((MORE, settings.h), (LESS, -settings.h))
    )
    return Bank("derivative", training, {"h": settings.h, "seed": settings.seed}, runs)


def _signs(units: int, settings: DerivativeSettings) -> NDArray[np.float64]:
    return np.random.default_rng([settings.seed, units]).choice([-1.0, 1.0], units)


def directional_derivative(
    bank: Bank,
    results: Sequence[RunResult],
    *,
    scores: NDArray[np.floating[Any]],
    queries: Mapping[str, str],
    settings: DerivativeSettings,
) -> DirectionalDerivative:
    """The table of a finished bank.

    Args:
        scores: `[units, queries]`, columns in the order of `queries`: key -> id.

    Raises:
        InputError: a result is given twice, or is none of this bank's.
    """
    refuse_duplicates_and_strangers(bank, results)
    by_label = {result.label: result.measurements for result in results}
    signs, rows = _signs(len(scores), settings), []
    for column, (key, id_) in enumerate(queries.items()):
        predicted, largest = float(signs @ scores[:, column].astype(np.float64)), float(np.abs(scores[:, column]).max())
        more, less = by_label[MORE].get(key), by_label[LESS].get(key)
        if more is None or less is None:
            rows.append(QueryDerivative(id_, predicted, None, None))
            continue
        difference = (more - less) / (2 * settings.h)
        scale = max(abs(predicted), abs(difference), largest, 1e-30)
        rows.append(QueryDerivative(id_, predicted, difference, abs(predicted - difference) / scale))
    return DirectionalDerivative(settings.h, settings.tolerance, tuple(rows))
