"""Where bytes become objects: atomic publication, one module per kind of storage. Knows no format and no digest.

A sink's promise: when `publish` returns, the object is durable with every byte that was written; when it raises, or
the process dies, the name is as it was before. `with fs.open(..., "wb")` keeps no such promise (an exception inside
publishes a truncated object), so fsspec's writers are not used for publication. Published objects are never renamed.
A new backend is one more class and one more line in `open_sink`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from magic_pipeline.errors import InputError

Write = Callable[[BinaryIO], None]
Names = list[str]  # a sink's own `list` hides the builtin inside its class


@dataclass(frozen=True)
class StoredObject:
    """What a listing tells of an object.

    Attributes:
        path: relative to the storage URL.
        size: bytes.
        modified: seconds since 1970 by the storage's clock.
    """

    path: str
    size: int
    modified: float


class Sink(Protocol):
    """One storage URL. All paths are relative to it, with "/" between parts.

    Attributes:
        reads_back: whether reading what was just written costs next to nothing, so that it can be checked every time.
    """

    reads_back: bool

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

    def size(self, path: str) -> int | None:
        """Bytes of the object, asked anew each time and without reading it; None where there is none."""

    def delete(self, path: str) -> None:
        """Removes the object, durably; no error when it is gone already."""

    def tree(self, folder: str) -> Iterator[StoredObject]:
        """Every finished object below the folder, at any depth and in any order; "" is the whole storage."""

    def unfinished(self, folder: str) -> Names:
        """Names of objects whose publication was begun and not finished: invisible to `list`, but taking space."""

    def discard_unfinished(self, folder: str, name: str) -> None:
        """Frees what unfinished publications of this name take. A writer still at it fails, and publishes nothing."""

    def unfinished_tree(self, folder: str) -> Iterator[StoredObject]:
        """What was begun and not finished anywhere below the folder, each under the name that it would have got.

        `modified` is when it was last written to, or begun where the storage tells no more. `size` is 0 where it does not tell.
        """

    def free_bytes(self) -> int | None:
        """Room left for this user; None where nobody knows."""

    def creates_exclusively(self) -> bool:
        """Whether `exclusive` can be relied on. May try it with an object that is removed again."""


# Protocols that fsspec knows and that keep nothing which could be resumed from.
_NOT_STORAGE = frozenset({"http", "https", "data", "reference", "git", "github", "gist", "zip", "tar", "libarchive"})


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
    if protocol in ("s3", "s3a"):
        from magic_pipeline.checkpoints.s3_sink import S3Sink

        return S3Sink(rest, options or {})
    if protocol in ("file", "local", "memory"):
        if options:
            raise InputError(
                f"{protocol}:// takes no storage options, found {', '.join(sorted(options))}", field="storage"
            )
        if protocol == "memory":
            from magic_pipeline.checkpoints.memory_sink import MemorySink

            return MemorySink(rest)
        from magic_pipeline.checkpoints.local_sink import LocalSink

        return LocalSink(Path(rest))
    from magic_pipeline.checkpoints.fsspec_sink import open_fsspec

    protocol = protocol.partition("::")[0]  # what follows may hold a password
    if protocol in _NOT_STORAGE or "::" in url:
        raise InputError(f"{protocol}:// is nothing that checkpoints can be kept in", field="storage")
    return open_fsspec(protocol, rest, options or {})
