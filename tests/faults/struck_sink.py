"""A sink around a real one that counts durable operations and strikes at one of them. Installed from outside: no product hooks."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from magic_pipeline.checkpoints import store as store_module
from magic_pipeline.checkpoints.sinks import Sink, Write, open_sink

Moment = Literal["before", "during", "after"]
Verb = Literal["publish", "delete", "discard"]


@dataclass(frozen=True)
class Operation:
    """Something that changes the storage for good."""

    verb: Verb
    path: str

    @property
    def moments(self) -> tuple[Moment, ...]:
        """When it can be struck: only a publication has a middle."""
        return ("before", "during", "after") if self.verb == "publish" else ("before", "after")


@dataclass(frozen=True)
class Strike:
    """The n-th durable operation of a process, counted from 0, before it, in the middle of its bytes or right after it."""

    n: int
    moment: Moment


class Operations:
    """The durable operations of this process, on whatever store: all of them, or those that count.

    Attributes:
        made: those that were begun, in order.
        sends: whether half of a publication is with the storage when it is struck in the middle.
    """

    def __init__(
        self,
        strike: Strike | None,
        act: Callable[[Operation], None],
        counts: Callable[[Operation], bool] = lambda operation: True,
        sends: bool = True,
    ) -> None:
        self.made: list[Operation] = []
        self.sends = sends
        self._strike, self._act, self._counts = strike, act, counts
        self._lock = threading.Lock()

    def begin(self, operation: Operation) -> Moment | None:
        """Counts it, and strikes if it is to be struck before it begins; otherwise says when it is to be struck."""
        if not self._counts(operation):
            return None
        with self._lock:
            number = len(self.made)
            self.made.append(operation)
        if self._strike is None or self._strike.n != number:
            return None
        if self._strike.moment == "before":
            self.act(operation)
        return self._strike.moment

    def act(self, operation: Operation) -> None:
        self._act(operation)


class StruckSink:
    """A sink like the one it is given."""

    def __init__(self, sink: Sink, operations: Operations) -> None:
        self._sink, self._operations = sink, operations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def publish(self, path: str, write: Write, *, exclusive: bool, size: int | None = None) -> None:
        operation = Operation("publish", path)
        moment = self._operations.begin(operation)
        if moment == "during":
            write = self._in_two_halves(operation, write)
        self._sink.publish(path, write, exclusive=exclusive, size=size)
        if moment == "after":
            self._operations.act(operation)

    def delete(self, path: str) -> None:
        self._strike_around(Operation("delete", path), lambda: self._sink.delete(path))

    def discard_unfinished(self, folder: str, name: str) -> None:
        operation = Operation("discard", f"{folder}/{name}")
        self._strike_around(operation, lambda: self._sink.discard_unfinished(folder, name))

    def _strike_around(self, operation: Operation, call: Callable[[], None]) -> None:
        moment = self._operations.begin(operation)
        call()
        if moment == "after":
            self._operations.act(operation)

    def _in_two_halves(self, operation: Operation, write: Write) -> Write:
        def writing(stream: BinaryIO) -> None:
            whole = io.BytesIO()
            write(whole)
            content = whole.getvalue()
            half = len(content) // 2
            send(stream, content[:half]) if self._operations.sends else stream.write(content[:half])
            self._operations.act(operation)
            stream.write(content[half:])

        return writing


def send(stream: Any, content: bytes) -> None:
    """Writes so that the bytes are with the storage: on S3 as a part of a multipart upload, for it keeps nothing smaller."""
    if hasattr(stream, "flush"):
        stream.write(content)
        stream.flush()
        return
    stream._part = len(content)
    stream.write(content)
    stream._parts[-1].result()


def install(
    strike: Strike | None,
    act: Callable[[Operation], None],
    counts: Callable[[Operation], bool] = lambda operation: True,
    sends: bool = True,
) -> Operations:
    """From now on every store that this process opens has a sink that counts and strikes."""
    operations = Operations(strike, act, counts, sends)

    def opening(*arguments: Any, **settings: Any) -> Any:
        return StruckSink(open_sink(*arguments, **settings), operations)

    vars(store_module)["open_sink"] = opening
    return operations
