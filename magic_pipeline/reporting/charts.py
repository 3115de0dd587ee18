"""Charts of a run as PNG: its loss, the distribution of scores, scores against steps, predicted against true changes.

Drawn as in `figures`: matplotlib's objects on an Agg canvas, without global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from magic_pipeline.reporting.figures import FRAME, HARMFUL, HELPFUL, INK, MUTED
from magic_pipeline.tasks.extras import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = npt.NDArray[np.floating[Any]]
_DOTS_PER_INCH = 150


class _Chart:
    def __init__(self, across: str, up: str, *, size: tuple[float, float] = (5.2, 2.6)) -> None:
        figures = import_extra("matplotlib.figure", extra="reports", needed_by="a chart")
        self._figure = figures.Figure(figsize=size, dpi=_DOTS_PER_INCH, facecolor="white", layout="constrained")
        self.axes: Axes = self._figure.add_subplot()
        self.axes.set_xlabel(across, fontsize=8, color=INK)
        self.axes.set_ylabel(up, fontsize=8, color=INK)
        self.axes.tick_params(labelsize=7, colors=MUTED)
        for side, spine in self.axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(FRAME)

    def png(self) -> bytes:
        with io.BytesIO() as file:
            self._figure.savefig(file, format="png", metadata={"Software": None})
            return file.getvalue()


def loss_chart(losses: Sequence[float]) -> bytes:
    """The training loss of every step."""
    chart = _Chart("training step", "loss")
    chart.axes.plot(range(len(losses)), losses, color=HELPFUL, linewidth=1)
    return chart.png()


def distribution_chart(scores: Numbers) -> bytes:
    """How many examples have which score, on a logarithmic axis: most are near 0."""
    chart = _Chart("score (negative: it helped)", "examples")
    bins = np.linspace(float(scores.min()), float(scores.max()), 61) if np.ptp(scores) else 1
    counts, edges = np.histogram(scores.astype(np.float64), bins=bins)
    middles = (edges[:-1] + edges[1:]) / 2
    colours = [HELPFUL if middle < 0 else HARMFUL for middle in middles]
    chart.axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=colours)
    chart.axes.set_yscale("symlog", linthresh=1)
    return chart.png()


def steps_chart(steps: Sequence[int], scores: Numbers) -> bytes:
    """Every example's score against the last step that used it."""
    chart = _Chart("last training step that used the example", "score")
    colours = np.where(scores < 0, HELPFUL, HARMFUL)
    chart.axes.axhline(0, color=FRAME, linewidth=0.8)
    chart.axes.scatter(steps, scores, s=5, c=colours.tolist(), alpha=0.5, linewidths=0, rasterized=True)
    return chart.png()


def prediction_chart(predicted: Sequence[Sequence[float]], actual: Sequence[Sequence[float]]) -> bytes:
    """True against predicted changes of every query and subset; on the line, magnitudes are right too."""
    chart = _Chart("predicted change", "true change", size=(4.2, 3.6))
    points = np.array([*map(np.ravel, (predicted, actual))], dtype=np.float64)
    points = points[:, np.isfinite(points).all(0)]
    if points.size:
        ends = [points.min(), points.max()]
        chart.axes.plot(ends, ends, color=FRAME, linewidth=1, zorder=0)
    chart.axes.scatter(points[0], points[1], s=6, color=HELPFUL, alpha=0.4, linewidths=0)
    return chart.png()
