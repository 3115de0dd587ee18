"""Signals during a walk. Dagster has no grace period: its handlers raise at the next bytecode, also inside the
sealing of a segment.

So whoever walks owns SIGTERM and SIGINT for that time: the handler only sets a flag, the walk looks at it after each
step and seals what is done, and then the interrupt that Dagster would have raised is raised.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from dagster._core.errors import DagsterExecutionInterruptedError

from magic_pipeline.errors import InterruptedWalkError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM and SIGINT do nothing but make the yielded function return True. At the end the former handlers
    are back and a signal that came is raised as DagsterExecutionInterruptedError, in place of any error that the work ended
    with meanwhile: who was told to stop must not be set to try again.

    Outside the main thread, where Python delivers no signals, the function always returns False.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    former = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: bool(received)
    except Exception as error:
        if received or isinstance(error, InterruptedWalkError):
            raise DagsterExecutionInterruptedError from error
        raise
    finally:
        for number, handler in former.items():
            # None: the former handler was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
        raise DagsterExecutionInterruptedError


def listen_to_interrupts() -> None:
    """Give SIGINT and SIGTERM their usual effect in the main thread of a process that was started with SIGINT ignored.

    Shells start background processes so, and Dagster then ignores SIGTERM too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interrupt(error: BaseException) -> bool:
    """Whether the error is an interrupt, or came up while one was being raised (torch.save turns it into a
    RuntimeError)."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, (DagsterExecutionInterruptedError, KeyboardInterrupt, InterruptedWalkError)):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False
