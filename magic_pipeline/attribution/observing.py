"""What training and a walk tell while they work: plain events to one callback. No torch.

Warnings go to the `magic_pipeline` loggers instead: a person has to see them whether or not anybody observes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingProgress:
    """After every training step.

    Attributes:
        resumed_from: the step that this process started at.
        steps_redone: at most so many steps are made again, whose segment an earlier process began and did not seal.
    """

    step: int
    steps: int
    loss: float
    steps_per_second: float
    eta_seconds: float
    resumed_from: int
    steps_redone: int = 0


@dataclass(frozen=True)
class WalkProgress:
    """After every backward step of a cohort.

    Attributes:
        step: the step whose cotangent is known now; the walk ends at 0.
        steps: of the whole run.
        keys: the queries that take part.
        resumed_from: per query, the step that it went on from; None where it started at the end of the run.
        steps_redone: at most so many steps are made again, whose segment an earlier process began and did not seal.
    """

    step: int
    steps: int
    segments_done: int
    segments: int
    keys: tuple[str, ...]
    steps_per_second: float
    eta_seconds: float
    resumed_from: Mapping[str, int | None]
    steps_redone: int


@dataclass(frozen=True)
class CheckpointSealed:
    """A checkpoint is durable. `key` is None for the trajectory."""

    key: str | None
    step: int
    bytes: int


@dataclass(frozen=True)
class QueryComplete:
    """A query's walk is finished and sealed; `digest` is `QueryStatus.walk_digest`."""

    key: str
    digest: str


@dataclass(frozen=True)
class RetrainingProgress:
    """After every step of a block of retrainings.

    Attributes:
        step: of the block's training, of `steps`.
        labels: the retrainings that take part.
        finished, retrainings: of the bank: how many are complete, of how many.
        steps_per_second, eta_seconds: of what is asked for, counting one step of one retraining as one.
        resumed_from: the step that the block went on from.
    """

    step: int
    steps: int
    labels: tuple[str, ...]
    finished: int
    retrainings: int
    steps_per_second: float
    eta_seconds: float
    resumed_from: int


@dataclass(frozen=True)
class RetrainingsComplete:
    """A block of retrainings is finished and sealed."""

    bank: str
    labels: tuple[str, ...]


Event = TrainingProgress | WalkProgress | CheckpointSealed | QueryComplete | RetrainingProgress | RetrainingsComplete
Observe = Callable[[Event], None]
ShouldStop = Callable[[], bool]


def unobserved(event: Event) -> None:
    """Nobody looks."""


def never() -> bool:
    """Nobody asks to stop."""
    return False
