"""Where bytes become objects: atomic publication, one class per kind of storage. Knows no format and no digest.

A sink's promise: when `publish` returns, the object is durable with every byte that was written; when it raises, or
the process dies, the name is as it was before. `with fs.open(..., "wb")` keeps no such promise (an exception inside
publishes a truncated object), so fsspec's writers are not used for publication. Published objects are never renamed.
A new backend is one more class and one more line in `open_sink`.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from magic_pipeline.checkpoints.failures import surfaced
from magic_pipeline.errors import InputError, MissingObjectError, ObjectExistsError, StorageError

Write = Callable[[BinaryIO], None]
Names = list[str]  # a sink's own `list` hides the builtin inside its class


class Sink(Protocol):
    """One storage URL. All paths are relative to it, with "/" between parts."""

    @property
    def url(self) -> str:
        """Where it is, for people: never with credentials."""

    def publish(self, path: str, write: Write, *, exclusive: bool, size: int | None = None) -> None:
        """Makes the object from what `write` writes: all of it and durable, or nothing at all.

        Args:
            write: called with a stream that has `write`; may be called again from the start if the backend retries.
            exclusive: create-only; of two concurrent calls exactly one succeeds. Otherwise the object is replaced.
            size: bytes to expect, for the message when storage is full.

        Raises:
            ObjectExistsError: exclusive, and the name is taken.
            StorageError: the bytes could not be written. Whatever else `write` raises comes through as itself.
        """

    def fetch(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A seekable stream of the object, at its start. Raises MissingObjectError, StorageError."""

    def list(self, folder: str) -> Names:
        """Names of direct children, sorted, uncached; nothing for a folder that is not there. No unfinished objects."""

    def exists(self, path: str) -> bool:
        """Whether the object is there, asked anew each time."""

    def delete(self, path: str) -> None:
        """Removes the object, durably; no error when it is gone already."""

    def unfinished(self, folder: str) -> Names:
        """Names of objects whose publication was begun and not finished: invisible to `list`, but taking space."""

    def discard_unfinished(self, folder: str, name: str) -> None:
        """Frees what unfinished publications of this name take. A writer still at it fails, and publishes nothing."""


def open_sink(url: str, options: Mapping[str, Any] | None = None) -> Sink:
    """The sink for a storage URL: the one place that knows which protocols there are.

    Raises:
        InputError: an unknown protocol or option, naming the known ones.
    """
    protocol, separator, rest = url.partition("://")
    if not separator:
        protocol, rest = "file", url
    if not rest.strip():
        raise InputError("expected a path or a URL, found no location in it", field="storage")
    if protocol not in ("file", "local", "memory"):
        raise InputError(
            f"unknown storage protocol {protocol.partition('::')[0]!r}; supported are a path, file:// and memory://",
            field="storage",
        )
    if options:
        raise InputError(f"{protocol}:// takes no storage options, found {', '.join(sorted(options))}", field="storage")
    return MemorySink(rest) if protocol == "memory" else LocalSink(Path(rest))


class LocalSink:
    """A folder on a local (or POSIX network) file system.

    A temporary file in the object's own folder, fsync, then `os.link` (create-only) or `os.replace`, then fsync of the
    folder. Temporary names start with a dot and are never listed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self._durable_folders: set[Path] = set()

    @property
    def url(self) -> str:
        return str(self.root)

    def publish(self, path: str, write: Write, *, exclusive: bool, size: int | None = None) -> None:
        target = self.root / path
        self._make_folder(target.parent)
        publish_file(target, write, exclusive=exclusive, size=size)

    @contextmanager
    def fetch(self, path: str) -> Iterator[BinaryIO]:
        target = self.root / path
        try:
            stream = open(target, "rb")  # noqa: SIM115  (closed below; the error of opening is not that of reading)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingObjectError(f"{target}: is not there") from None
        except OSError as error:
            raise StorageError(f"{target}: could not be opened: {error.strerror}") from error
        with stream:
            yield stream

    def list(self, folder: str) -> Names:
        return sorted(name for name in self._names(folder) if not name.startswith("."))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.root / path)

    def delete(self, path: str) -> None:
        target = self.root / path
        try:
            os.unlink(target)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StorageError(f"{target}: could not be deleted: {error.strerror}") from error
        # Deletions are ordered (a manifest before its blobs), and only fsync keeps that order through a power cut.
        _sync_folder(target.parent)

    def unfinished(self, folder: str) -> Names:
        return sorted({_final_name(name) for name in self._names(folder) if _is_temporary(name)})

    def discard_unfinished(self, folder: str, name: str) -> None:
        for found in self._names(folder):
            if _is_temporary(found) and _final_name(found) == name:
                self.delete(f"{folder}/{found}")

    def _names(self, folder: str) -> Names:
        try:
            return os.listdir(self.root / folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.root / folder}: could not be listed: {error.strerror}") from error

    def _make_folder(self, folder: Path) -> None:
        """Makes the folder, durably, once per process."""
        if folder in self._durable_folders and folder.is_dir():
            return
        # What mkdir makes is durable only once the folder above it is synced too, up to one that was there before.
        there = next(parent for parent in (self.root, *self.root.parents) if parent.is_dir())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for made in (folder, *folder.parents):
                _sync_folder(made)
                if made == there:
                    break
        except OSError as error:
            raise StorageError(f"{folder}: could not be made: {error.strerror}") from error
        self._durable_folders.add(folder)


def publish_file(target: Path, write: Write, *, exclusive: bool, size: int | None = None) -> None:
    """Publishes one local file atomically and durably; its folder is there. Promise and errors as `Sink.publish`."""
    handled = sys.exception()
    if exclusive and os.path.lexists(target):
        raise ObjectExistsError(f"{target}: exists already, and is written only once")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    written = 0
    try:
        with open(temporary, "xb") as stream:
            try:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            finally:
                written = stream.tell()
        if exclusive:
            _link_new(temporary, target)
        else:
            os.replace(temporary, target)
        _sync_folder(target.parent)
    except BaseException as error:
        reason = surfaced(error, handled, str(target), written, size)
        if reason is error:
            raise
        raise reason from (error if isinstance(reason, Exception) else None)
    finally:
        temporary.unlink(missing_ok=True)


def _link_new(temporary: Path, target: Path) -> None:
    """Gives the finished file its name, only if the name is free."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        # A network file system may have linked it and lost the answer; then the name is this very file.
        if not os.path.samefile(temporary, target):
            raise ObjectExistsError(f"{target}: exists already, and is written only once") from None
    except FileNotFoundError:
        # The winner of a race for this name may have discarded what the losers left unfinished.
        if os.path.lexists(target):
            raise ObjectExistsError(f"{target}: exists already, and is written only once") from None
        raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise StorageError(
                f"{target}: this file system has no hard links, so nothing can be created exclusively; "
                "choose another storage"
            ) from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


def _final_name(temporary: str) -> str:
    return temporary[1:].removesuffix(".partial").rpartition(".")[0]


_memory_lock = threading.Lock()


class MemorySink:
    """fsspec's memory:// of this process: for tests and trials. Nothing outlives the process."""

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

    def delete(self, path: str) -> None:
        with _memory_lock:
            if self._files.isfile(self._at(path)):
                self._files.rm_file(self._at(path))

    def unfinished(self, folder: str) -> Names:
        return []

    def discard_unfinished(self, folder: str, name: str) -> None:
        return

    def _at(self, path: str) -> str:
        return f"/{self._root}/{path}"
