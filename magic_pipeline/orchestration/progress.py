"""Progress of training and of a walk: lines in the run's log, observations of the asset, and a word when nothing moves.

The measure of progress is the counter of finished steps, never the age of a file or of a log line.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from magic_pipeline.attribution.observing import (
    CheckpointSealed,
    Event,
    QueryComplete,
    RetrainingProgress,
    RetrainingsComplete,
    TrainingProgress,
    WalkProgress,
)

logger = logging.getLogger("magic_pipeline.progress")

LINE_SECONDS = 10.0
OBSERVATION_SECONDS = 60.0
STALL_SECONDS = 300.0


class RunProgress:
    """Observes training or a walk on behalf of one run.

    The first and the last step always give a line; in between a line comes at most every `LINE_SECONDS` and an
    observation every `OBSERVATION_SECONDS`, as an event costs about as much as a small step.

    Attributes:
        steps, checkpoints: made and sealed by this run so far.
    """

    def __init__(self, context: dg.AssetExecutionContext) -> None:
        self._context = context
        self._last_line = self._last_observation = float("-inf")
        self._moved = time.monotonic()
        self.steps = self.checkpoints = self._bytes = self._completed = 0
        self._facts: dict[str, Any] = {}

    def __call__(self, event: Event) -> None:
        self._moved = time.monotonic()
        if isinstance(event, CheckpointSealed):
            self.checkpoints += 1
            self._bytes += event.bytes
        elif isinstance(event, QueryComplete):
            self._completed += 1
            logger.info("query %s: the walk is complete", event.key)
        elif isinstance(event, RetrainingsComplete):
            self._completed += len(event.labels)
            logger.info("retrainings %s to %s are finished", event.labels[0], event.labels[-1])
        elif isinstance(event, RetrainingProgress):
            self.steps += len(event.labels)
            self._facts = {
                "step": event.step,
                "retrainings_together": len(event.labels),
                "retrainings_finished": event.finished,
                **_rates(event),
            }
            done = f"{event.finished} of {event.retrainings} finished"
            last = event.step >= event.steps and event.finished + len(event.labels) >= event.retrainings
            self._tell(f"{len(event.labels)} retrainings: step {event.step} of {event.steps}, {done}", last)
        elif isinstance(event, TrainingProgress):
            self.steps += 1
            self._facts = {"step": event.step, "loss": event.loss, **_rates(event)}
            self._tell(
                f"training: step {event.step} of {event.steps}, loss {event.loss:.4g}", event.step >= event.steps
            )
        else:
            self.steps += 1
            self._facts = {
                "step": event.step,
                "segments_done": event.segments_done,
                "segments": event.segments,
                "queries_walked": len(event.keys),
                "steps_redone": event.steps_redone,
                **_rates(event),
            }
            segments = f"{event.segments_done} of {event.segments} segments"
            self._tell(f"walk of {len(event.keys)} queries: at step {event.step}, {segments} done", event.step == 0)

    def _tell(self, what: str, last: bool) -> None:
        now = time.monotonic()
        if last or now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            rate, left = self._facts["steps_per_second"], self._facts["eta_seconds"]
            logger.info("%s, %.3g steps/s, %s left", what, rate, duration(left))
        if now - self._last_observation >= OBSERVATION_SECONDS:
            self._last_observation = now
            self._context.log_event(dg.AssetObservation(self._context.asset_key, metadata=self.metadata()))

    def metadata(self) -> dict[str, Any]:
        """Where the work is now: steps made by this run, checkpoints and bytes sealed, rate and seconds left."""
        return {
            **self._facts,
            "steps_made": self.steps,
            "checkpoints_sealed": self.checkpoints,
            "bytes_sealed": self._bytes,
        }

    @contextmanager
    def watched(self, stall_seconds: float = STALL_SECONDS) -> Iterator[None]:
        """Within, a warning says so each time that no step and no checkpoint was finished for `stall_seconds`."""
        self._moved = time.monotonic()
        ended = threading.Event()

        def watch() -> None:
            warned_at = self._moved
            while not ended.wait(min(stall_seconds / 4, 15.0)):
                idle = time.monotonic() - max(self._moved, warned_at)
                if idle >= stall_seconds:
                    warned_at = time.monotonic()
                    still = warned_at - self._moved
                    logger.warning("stalled? No step was finished for %s (%d made so far)", duration(still), self.steps)

        thread = threading.Thread(target=watch, name="stall watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _rates(event: TrainingProgress | WalkProgress | RetrainingProgress) -> dict[str, Any]:
    resumed = event.resumed_from
    if not isinstance(resumed, int):
        known = [step for step in resumed.values() if step is not None]
        resumed = min(known) if known else event.steps
    return {
        "steps": event.steps,
        "steps_per_second": event.steps_per_second,
        "eta_seconds": event.eta_seconds,
        "resumed_from_step": resumed,
    }


def duration(seconds: float) -> str:
    """Seconds as people read them.

    >>> duration(7.4), duration(90), duration(7500)
    ('7 s', '1 min 30 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
