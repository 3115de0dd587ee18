"""Writing while compute goes on: one piece of work at a time in a thread of its own, and no error is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from magic_pipeline.checkpoints.store import Store

logger = logging.getLogger("magic_pipeline.checkpoints")

T = TypeVar("T")

# A smaller save to a local disk takes less time than a thread is worth, and leaves nothing at risk meanwhile.
WORTH_A_THREAD = 64 * 2**20


def is_worth_a_thread(store: Store, size: int) -> bool:
    """Whether a save of `size` bytes takes long enough that compute should not wait for it."""
    return size >= WORTH_A_THREAD or not store.sink.reads_back


class Background(Generic[T]):
    """At most one piece of work is under way. As a context manager it waits for it at the end, whatever happened.

    What a piece of work holds must not be changed while it is under way: it works on references, not on copies.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: list[T] = []
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
            return
        if self._thread is not None and self._thread.ident is not None:  # an interrupt may come before it is started
            self._thread.join()
        if self._error is not None:
            logger.warning("a save in the background failed too: %s", self._error)

    def start(self, work: Callable[[], T]) -> None:
        """Begins `work`. The piece before must have been waited for."""
        if self._thread is not None:
            raise RuntimeError("the work before was not waited for")

        def run() -> None:
            try:
                self._results.append(work())
            except BaseException as error:  # noqa: BLE001 - raised by `wait`, in the thread that asked for the work
                self._error = error

        # A daemon: who is interrupted twice while it waits wants to leave, and half a save is none.
        self._thread = threading.Thread(target=run, name="magic-background", daemon=True)
        self._thread.start()

    def finished(self) -> list[T]:
        """The result of work that has ended and was not asked for yet, without waiting. Raises what it raised."""
        return [] if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> list[T]:
        """The result of the work under way once it has ended; nothing where there is none. Raises what it raised."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        results, self._results = self._results, []
        return results
