"""Progress of training and of a walk: lines in the run's log, observations of the asset, and a word when nothing moves.

The measure of progress is the counter of finished steps, never the age of a file or of a log line.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Iterator, Mapping
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

RESUMED_TAG, LOST_TAG = "magic_pipeline/resumed", "magic_pipeline/lost"
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
        self._told: dict[tuple[str, ...], int] = {}
        self._resumed: dict[str, int] = {}

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
            self._facts = {
                "step": event.step,
                "loss": event.loss,
                "steps_redone": event.steps_redone,
                **_rates(event),
            }
            self._tell_resumed({"training": event.resumed_from or None}, event.steps_redone)
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
            self._tell_resumed(event.resumed_from, event.steps_redone)
            segments = f"{event.segments_done} of {event.segments} segments"
            self._tell(f"walk of {len(event.keys)} queries: at step {event.step}, {segments} done", event.step == 0)

    def moved(self) -> None:
        """Waiting for another process is no stall."""
        self._moved = time.monotonic()

    def _tell(self, what: str, last: bool) -> None:
        now = time.monotonic()
        if last or now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            rate, left = self._facts["steps_per_second"], self._facts["eta_seconds"]
            logger.info("%s, %.3g steps/s, %s left", what, rate, duration(left))
        if now - self._last_observation >= OBSERVATION_SECONDS:
            self._last_observation = now
            self._context.log_event(dg.AssetObservation(self._context.asset_key, metadata=self.metadata()))

    def _tell_resumed(self, resumed_from: Mapping[str, int | None], redone: int) -> None:
        """As tags of the run, once for each cohort: what went on, from where, and what an earlier process lost."""
        cohort = tuple(resumed_from)
        if cohort in self._told:
            return
        self._told[cohort] = redone
        self._resumed |= {key: step for key, step in resumed_from.items() if step is not None}
        tags = resumed_tags(self._resumed, sum(self._told.values()))
        run = self._context.run
        # A run that is executed again inherits tags that are no longer true.
        if tags or RESUMED_TAG in run.tags or LOST_TAG in run.tags:
            cleared = {RESUMED_TAG: "nothing", LOST_TAG: "nothing"}
            self._context.instance.add_run_tags(run.run_id, cleared | tags)

    def metadata(self) -> dict[str, Any]:
        """Where the work is now: steps made by this run, checkpoints and bytes sealed, rate and seconds left."""
        return {
            **self._facts,
            "steps_made": self.steps,
            "checkpoints_sealed": self.checkpoints,
            "bytes_sealed": self._bytes,
        }

    @contextmanager
    def watched(self, stall_seconds: float = STALL_SECONDS, end_seconds: float | None = None) -> Iterator[None]:
        """Within, a warning says so each time that no step and no checkpoint was finished for `stall_seconds`.

        Args:
            end_seconds: after so long without one the process is ended, the stacks of all its threads on stderr: whoever watches
                runs then finds it gone and starts it again. It works even where the interpreter hangs. None: never.
        """
        self._moved = time.monotonic()
        ended = threading.Event()
        ends = "" if end_seconds is None else f"; after {duration(end_seconds)} the process is ended"

        def watch() -> None:
            warned_at = armed_at = self._moved
            while not ended.wait(min(stall_seconds / 4, (end_seconds or stall_seconds) / 4, 15.0)):
                if end_seconds is not None and self._moved > armed_at:
                    armed_at = self._moved
                    _end_process_in(end_seconds)
                idle = time.monotonic() - max(self._moved, warned_at)
                if idle >= stall_seconds:
                    warned_at = time.monotonic()
                    still = warned_at - self._moved
                    logger.warning(
                        "stalled? No step was finished for %s (%d made so far)%s", duration(still), self.steps, ends
                    )

        thread = threading.Thread(target=watch, name="stall watch", daemon=True)
        if end_seconds is not None:
            _end_process_in(end_seconds)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if end_seconds is not None:
                faulthandler.cancel_dump_traceback_later()


def _end_process_in(seconds: float) -> None:
    # A thread of C's, which needs no lock of the interpreter's. By number: sys.stderr may be no file.
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


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


def resumed_tags(resumed_from: Mapping[str, int], redone: int) -> dict[str, str]:
    """What a run went on from, and at most how much is made again; nothing where it began everything itself.

    >>> resumed_tags({"training": 40}, 10)
    {'magic_pipeline/resumed': 'training from step 40', 'magic_pipeline/lost': 'at most 10 steps'}
    >>> resumed_tags({"a": 40, "b": 20}, 0)["magic_pipeline/resumed"]
    '2 queries from steps 20 to 40'
    """
    if not resumed_from and not redone:
        return {}
    low, high = min(resumed_from.values(), default=0), max(resumed_from.values(), default=0)
    where = f"step {low}" if low == high else f"steps {low} to {high}"
    queries = f"{len(resumed_from)} {'query' if len(resumed_from) == 1 else 'queries'}"
    what = "training" if "training" in resumed_from else queries
    return {
        RESUMED_TAG: f"{what} from {where}" if resumed_from else "nothing",
        LOST_TAG: f"at most {redone} {'step' if redone == 1 else 'steps'}" if redone else "nothing",
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
