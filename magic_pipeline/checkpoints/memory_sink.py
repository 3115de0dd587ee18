"""fsspec's memory:// as storage, for tests and trials."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import BinaryIO

from magic_pipeline.checkpoints.failures import surfaced
from magic_pipeline.checkpoints.sinks import Names, StoredObject, Write
from magic_pipeline.errors import MissingObjectError, ObjectExistsError

_memory_lock = threading.Lock()


class MemorySink:
    """fsspec's memory:// of this process: for tests and trials. Nothing outlives the process."""

    reads_back = True

    def __init__(self, root: str) -> None:
        import fsspec

        self._root = root.strip("/")
        self._files = fsspec.filesystem("memory")

    @property
    def url(self) -> str:
        return f"memory://{self._root}"

    def publish(self, path: str, write: Write, *, exclusive: bool, size: int | None = None) -> None:
        handled = sys.exception()
        stream = io.BytesIO()
        try:
            write(stream)
        except BaseException as error:
            reason = surfaced(error, handled, f"{self.url}/{path}", stream.tell(), size)
            if reason is error:
                raise
            raise reason from (error if isinstance(reason, Exception) else None)
        with _memory_lock:
            if exclusive and self._files.isfile(self._at(path)):
                raise ObjectExistsError(f"{self.url}/{path}: exists already, and is written only once")
            self._files.pipe_file(self._at(path), stream.getvalue())

    @contextmanager
    def fetch(self, path: str) -> Iterator[BinaryIO]:
        with _memory_lock:
            try:
                content = self._files.cat_file(self._at(path))
            except FileNotFoundError:
                raise MissingObjectError(f"{self.url}/{path}: is not there") from None
        yield io.BytesIO(content)

    def list(self, folder: str) -> Names:
        with _memory_lock:
            try:
                found = self._files.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted(name.rpartition("/")[2] for name in found)

    def exists(self, path: str) -> bool:
        with _memory_lock:
            return bool(self._files.isfile(self._at(path)))

    def size(self, path: str) -> int | None:
        with _memory_lock:
            return int(self._files.size(self._at(path))) if self._files.isfile(self._at(path)) else None

    def delete(self, path: str) -> None:
        with _memory_lock:
            if self._files.isfile(self._at(path)):
                self._files.rm_file(self._at(path))

    def tree(self, folder: str) -> Iterator[StoredObject]:
        with _memory_lock:
            found = self._files.find(self._at(folder), detail=True)
        for name, details in found.items():
            path = name.removeprefix(self._at("")).lstrip("/")
            created = details["created"]  # a datetime in some versions of fsspec, seconds in others
            seconds = created.timestamp() if isinstance(created, datetime) else float(created)
            yield StoredObject(path, details["size"], seconds)

    def unfinished(self, folder: str) -> Names:
        return []

    def discard_unfinished(self, folder: str, name: str) -> None:
        return

    def unfinished_tree(self, folder: str) -> Iterator[StoredObject]:
        return iter(())

    def free_bytes(self) -> int | None:
        return None

    def creates_exclusively(self) -> bool:
        return True

    def _at(self, path: str) -> str:
        return f"/{self._root}/{path}"
