"""Learning rates for every step, computed once before training: a table, so that nothing depends on where a walk resumes.

The factors are those of transformers' `get_scheduler`: a linear warm-up `step / warmup_steps` that starts at 0, then constant, a
linear decay to 0, half a cosine to 0, several of them with hard restarts, a power of the steps left, or 1 / sqrt(step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from magic_pipeline.errors import InputError

SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "table")


def learning_rates(
    name: str,
    *,
    lr: float,
    steps: int,
    warmup_steps: int = 0,
    values: Sequence[float] | None = None,
    cycles: int = 1,
    power: float = 1.0,
    lr_end: float = 1e-7,
    timescale: int | None = None,
) -> tuple[float, ...]:
    """The learning rate of each of `steps` steps.

    Args:
        name: one of SCHEDULES; for `table`, `values` are the learning rates themselves.
        lr: the peak learning rate.
        warmup_steps: steps of linear warm-up.
        values: one learning rate a step, for `table` only.
        cycles: of `cosine_with_restarts`.
        power, lr_end: of `polynomial`: `(lr - lr_end) * (part of the steps left)^power + lr_end`.
        timescale: of `inverse_sqrt`; by default the warm-up's steps, or 10,000 without one.

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
        if name == "polynomial" and not lr_end < lr:
            raise InputError(
                f"the last learning rate, {lr_end:g}, should be below the first, {lr:g}",
                field="training.schedule.lr_end",
            )
        after = {
            "constant": lambda progress, step: 1.0,
            "linear": lambda progress, step: max(0.0, 1.0 - progress),
            "cosine": lambda progress, step: max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress))),
            "cosine_with_restarts": lambda progress, step: _restarted(progress, cycles),
            "polynomial": lambda progress, step: ((lr - lr_end) * (1 - progress) ** power + lr_end) / lr,
            "inverse_sqrt": lambda progress, step: _inverse_sqrt(step, warmup_steps, timescale),
        }[name]
        rates = tuple(lr * _factor(after, step, steps, warmup_steps) for step in range(steps))
    bad = [step for step, rate in enumerate(rates) if not (math.isfinite(rate) and rate >= 0)]
    if bad:
        raise InputError(
            f"the learning rate of step {bad[0]} is {rates[bad[0]]}; expected a finite number of at least 0",
            field="training.schedule",
        )
    return rates


def _factor(after: Callable[[float, int], float], step: int, steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    return after((step - warmup_steps) / max(1, steps - warmup_steps), step)


def _restarted(progress: float, cycles: int) -> float:
    return 0.0 if progress >= 1 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0))))


def _inverse_sqrt(step: int, warmup_steps: int, timescale: int | None) -> float:
    scale = timescale or warmup_steps or 10_000
    return 1 / math.sqrt((step + scale - warmup_steps) / scale)
