"""Waiting for storage that is away for a while: throttled, restarting, unreachable. Hours of work outlast minutes of that."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from magic_pipeline.errors import InputError, StorageError

logger = logging.getLogger("magic_pipeline.checkpoints")

T = TypeVar("T")


class TransientError(Exception):
    """Trying again may help. Never leaves this room: `Patience.outlast` gives up with a StorageError."""


def seconds_from_environment(name: str, default: float) -> float:
    """The variable's value. Raises InputError, naming it, when it is no number of seconds from 0 up."""
    text = os.environ.get(name, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError(f"expected a number of seconds, found {text!r}", field=name)
    return seconds


def patience_seconds() -> float:
    """For how long an operation is tried again: MAGIC_STORAGE_PATIENCE_SECONDS, or a quarter of an hour."""
    return seconds_from_environment("MAGIC_STORAGE_PATIENCE_SECONDS", 900)


_limit: ContextVar[float] = ContextVar("limit of patience", default=math.inf)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Within it this thread tries nothing again for longer: for what is only tidied up, while an end or an interrupt waits."""
    token = _limit.set(min(seconds, _limit.get()))
    try:
        yield
    finally:
        _limit.reset(token)


@dataclass(frozen=True)
class Patience:
    """Exponential backoff with full jitter (so that many ranks do not come back in step), within a total time.

    Attributes:
        seconds: in all, counted from the first failure.
        shortest, longest: bounds of the wait before jitter.
        given_up: when set, waiting ends at once with the last failure.
    """

    seconds: float = field(default_factory=patience_seconds)
    shortest: float = 0.5
    longest: float = 30.0
    given_up: threading.Event = field(default_factory=threading.Event)

    def outlast(self, call: Callable[[], T], what: str) -> T:
        """`call()`, made again for as long as it raises TransientError.

        Args:
            what: the object and what is done to it, for messages.

        Raises: StorageError when the time is up, naming the object, the last reason and how long it was tried.
        """
        began: float | None = None
        seconds, wait = min(self.seconds, _limit.get()), self.shortest
        while True:
            try:
                return call()
            except TransientError as error:
                now = time.monotonic()
                began = now if began is None else began
                pause = random.uniform(wait / 2, wait)  # noqa: S311  (jitter, no secret)
                if now + pause - began > seconds or self.given_up.is_set():
                    raise StorageError(f"{what}: {error}; given up after {now - began:.0f} s of trying") from error
                left = seconds - (now - began)
                logger.warning("%s: %s; trying again in %.1f s, for %.0f s at most", what, error, pause, left)
                self.given_up.wait(pause)
                wait = min(2 * wait, self.longest)
