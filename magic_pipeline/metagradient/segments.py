"""Where a run is cut into segments, where a walk is sealed, and how a span is split when its states do not fit in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from magic_pipeline.errors import InputError


def segment_boundaries(steps: int, segment_steps: int | None = None) -> tuple[int, ...]:
    """The steps whose states are stored: 0, every `segment_steps` (default isqrt(steps)), and `steps` itself.

    >>> segment_boundaries(10)
    (0, 3, 6, 9, 10)
    >>> segment_boundaries(10, 4)
    (0, 4, 8, 10)
    """
    if steps < 1:
        raise InputError(f"the run has {steps} steps; expected at least 1", field="training")
    length = math.isqrt(steps) if segment_steps is None else segment_steps
    if length < 1:
        raise InputError(f"{length} steps a segment; expected at least 1", field="attribution.segment_steps")
    return (*range(0, steps, length), steps)


def save_steps(boundaries: Sequence[int], save_every: Literal["segment"] | int) -> tuple[int, ...]:
    """The steps at which a walk is sealed, descending, 0 last.

    `save_every` counts backward steps from the end of the run, so a number is honoured inside segments too.

    >>> save_steps((0, 3, 6, 9, 10), "segment")
    (9, 6, 3, 0)
    >>> save_steps((0, 3, 6, 9, 10), 4)
    (6, 2, 0)
    """
    if save_every == "segment":
        return tuple(sorted(boundaries[:-1], reverse=True))
    if save_every < 1:
        raise InputError(f"{save_every} steps between saves; expected at least 1", field="attribution.save_every")
    inside = range(boundaries[-1] - save_every, 0, -save_every)
    return (*inside, 0)


def split(length: int, hold: int) -> int:
    """How far to advance before a span of `length` steps is split, when `hold` states fit in memory: binomial splitting.

    With `hold` states and every step made at most `r` times, spans of up to C(hold + r, hold) steps can be reversed
    (Griewank & Walther 2000, "Revolve"); the right part is as long as its share of that allows.

    >>> split(10, 3)
    4
    """
    repetitions = 1
    while math.comb(hold + repetitions, hold) < length:
        repetitions += 1
    return min(length - 1, max(1, length - math.comb(hold + repetitions - 1, hold - 1)))
