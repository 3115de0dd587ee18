"""What the processes of a gang tell each other beside the numbers: decisions, names of blobs, whether all is whole.

Not a collective: it waits for as long as another process needs for its disk or network, while collectives have a time-out. A
process that has ended is noticed by whoever started the gang, who then ends the others.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_FOR_EVER = timedelta(days=30)


class Board(Protocol):
    """Messages between processes that all make the same calls in the same order.

    Attributes:
        leads: whether this is the process that decides and writes manifests: process 0.
    """

    leads: bool

    def collect(self, content: Any) -> list[Any]:
        """Every process's content (plain JSON data), in the order of the processes."""
        ...

    def channel(self, name: str) -> Board:
        """The same processes, with an order of calls of its own: for another thread."""
        ...


def decided(board: Board, content: Any) -> Any:
    """What the leading process says, for all of them; the others' content is not looked at."""
    return board.collect(content if board.leads else None)[0]


class OwnBoard:
    """The board of a process that works alone."""

    leads = True

    def collect(self, content: Any) -> list[Any]:
        return [content]

    def channel(self, name: str) -> OwnBoard:
        return self


class StoreBoard:
    """A board on a torch.distributed store that all processes are connected to.

    Args:
        store: this process's connection, for this board alone: while one thread waits on a connection, no other gets through.
    """

    def __init__(self, store: Store, process: int, processes: int, name: str = "board") -> None:
        self._store, self._process, self._processes, self._name = store, process, processes, name
        self._calls = 0
        self.leads = process == 0

    def collect(self, content: Any) -> list[Any]:
        call, self._calls = self._calls, self._calls + 1
        self._store.set(self._key(call, self._process), json.dumps(content))
        keys = [self._key(call, process) for process in range(self._processes)]
        self._store.wait(keys, _FOR_EVER)
        contents = [json.loads(self._store.get(key)) for key in keys]
        if call > 0:
            # All have written here, so all have read the call before.
            self._store.delete_key(self._key(call - 1, self._process))
        return contents

    def channel(self, name: str) -> StoreBoard:
        clone = self._store.clone()  # type: ignore[attr-defined] # its stub does not know it
        return StoreBoard(clone, self._process, self._processes, name)

    def _key(self, call: int, process: int) -> str:
        return f"{self._name}/{call}/{process}"
