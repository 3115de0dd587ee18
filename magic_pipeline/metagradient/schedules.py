"""Learning rates for every step, computed once before training: a table, so that nothing depends on where a walk resumes.

The factors are those of transformers' `get_scheduler`: a linear warm-up `step / warmup_steps` that starts at 0, then constant, a
linear decay to 0 or half a cosine to 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from magic_pipeline.errors import InputError

SCHEDULES = ("constant", "linear", "cosine", "table")


def learning_rates(
    name: str, *, lr: float, steps: int, warmup_steps: int = 0, values: Sequence[float] | None = None
) -> tuple[float, ...]:
    """The learning rate of each of `steps` steps.

    Args:
        name: `constant`, `linear`, `cosine`, or `table` (then `values` are the learning rates themselves).
        lr: the peak learning rate.
        warmup_steps: steps of linear warm-up.
        values: one learning rate a step, for `table` only.

    Raises:
        InputError: an unknown name, a table of another length, or a learning rate that is negative or not finite.
    """
    if name not in SCHEDULES:
        raise InputError(f"unknown schedule {name!r}; known are {', '.join(SCHEDULES)}", field="training.schedule.name")
    if name == "table":
        rates = tuple(float(value) for value in values or ())
        if len(rates) != steps:
            raise InputError(
                f"the table has {len(rates)} learning rates, the run has {steps} steps",
                field="training.schedule.values",
            )
    else:
        if warmup_steps > steps:
            raise InputError(
                f"{warmup_steps} warm-up steps are more than the run's {steps} steps",
                field="training.schedule.warmup_steps",
            )
        rates = tuple(lr * _factor(name, step, steps, warmup_steps) for step in range(steps))
    bad = [step for step, rate in enumerate(rates) if not (math.isfinite(rate) and rate >= 0)]
    if bad:
        raise InputError(
            f"the learning rate of step {bad[0]} is {rates[bad[0]]}; expected a finite number of at least 0",
            field="training.schedule",
        )
    return rates


def _factor(name: str, step: int, steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if name == "linear":
        return max(0.0, 1.0 - progress)
    if name == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    return 1.0
