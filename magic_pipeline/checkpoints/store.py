"""Objects with digests at one storage URL: JSON objects, tensor blobs, files. Knows no layout and no training.

Every object is published atomically (sinks.py) and checked when it is read: damage raises, naming the object, what was
expected and what was found. Importing this module and reading JSON does not import torch.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import xxhash

from magic_pipeline.checkpoints.digests import DIGEST_PREFIX
from magic_pipeline.checkpoints.documents import document_bytes, document_content
from magic_pipeline.checkpoints.local_sink import publish_file
from magic_pipeline.checkpoints.sinks import Names, StoredObject, open_sink
from magic_pipeline.errors import DamagedObjectError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("magic_pipeline.checkpoints")

T = TypeVar("T")

CHUNK = 4 * 2**20  # bytes per read while hashing


@dataclass(frozen=True)
class Blob:
    """What a manifest says of a blob: its name in its folder, its bytes and their `xxh3_128:<hex>` digest."""

    name: str
    size: int
    digest: str

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "digest": self.digest}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Blob:
        """Raises KeyError, TypeError or ValueError when the content is no blob's."""
        name, size, digest = content["name"], content["size"], content["digest"]
        if not (isinstance(name, str) and isinstance(digest, str)) or type(size) is not int:
            raise TypeError(f"expected name, size and digest of a blob, found {content!r}")
        checked_path(name)
        return cls(name, size, digest)


def checked_path(path: str) -> str:
    """The path itself. Raises ValueError when it could leave the storage URL or name a hidden object."""
    if any(part == "" or part.startswith(".") for part in path.split("/")):
        raise ValueError(f"expected parts that are neither empty nor start with a dot, found {path!r}")
    return path


class Store:
    """One object per storage URL. Paths are relative to it, "/"-separated; folders come into being with their objects.

    Raises:
        InputError: the URL's protocol is unknown, naming the known ones.
    """

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None) -> None:
        self.sink = open_sink(url, options)
        self._exclusive: bool | None = None

    @property
    def url(self) -> str:
        """Where the store is, for people: never with credentials."""
        return self.sink.url

    def warn_unless_exclusive(self) -> None:
        """Says loudly, once, when the storage cannot create an object exclusively. Raises StorageError."""
        if self._exclusive is None:
            self._exclusive = self.sink.creates_exclusively()
            if not self._exclusive:
                logger.warning(
                    "%s CANNOT CREATE OBJECTS EXCLUSIVELY: start one run at a time on it, for two would not notice each other "
                    "at once (scores stay right; work may be done twice)",
                    self.url,
                )

    def create_json(self, path: str, content: Mapping[str, Any]) -> None:
        """Create-only: of two concurrent calls exactly one succeeds. Raises ObjectExistsError, StorageError."""
        self._publish_json(path, content, exclusive=True)

    def replace_json(self, path: str, content: Mapping[str, Any]) -> None:
        """Atomic: readers see the former content or the new one. Raises StorageError."""
        self._publish_json(path, content, exclusive=False)

    def read_json(self, path: str) -> dict[str, Any]:
        """The content as it was written (tuples come back as lists). Raises MissingObjectError, DamagedObjectError."""

        def read() -> dict[str, Any]:
            with self._fetch(path) as stream:
                raw = b"".join(_chunks(stream, self._name(path)))
            return document_content(raw, self._name(path))

        return self._believed(read)

    def write_blob(self, folder: str, tensors: Mapping[str, Tensor], *, prefix: str = "") -> Blob:
        """Stores the tensors under a fresh name (`{prefix}{random}.pt`), streaming: no copy in RAM beside them.

        Names, dtypes, shapes and bytes are kept; devices, `requires_grad` and shared memory are not (`storable`).

        Raises: StorageError; TypeError for tensors that are not dense.
        """
        from magic_pipeline.checkpoints.tensor_files import save_tensors, storable

        stored = storable(tensors)
        size = sum(tensor.nbytes for tensor in stored.values())
        return self._write_fresh(folder, prefix, ".pt", lambda stream: save_tensors(stored, stream), size)

    def read_blob(self, folder: str, blob: Blob) -> dict[str, Tensor]:
        """The tensors bit for bit, on the CPU; every byte is verified first.

        Raises: MissingObjectError, DamagedObjectError.
        """
        from magic_pipeline.checkpoints.tensor_files import load_tensors

        path = f"{folder}/{blob.name}"

        def read() -> dict[str, Tensor]:
            with self._fetch(path) as stream:
                self._verify(stream, path, blob)
                stream.seek(0)
                return load_tensors(stream)

        return self._believed(read)

    def verify_blob(self, folder: str, blob: Blob) -> None:
        """Reads every byte and keeps none. Raises MissingObjectError, DamagedObjectError. Does not import torch."""
        path = f"{folder}/{blob.name}"

        def read() -> None:
            with self._fetch(path) as stream:
                self._verify(stream, path, blob)

        self._believed(read)

    def write_file(self, folder: str, source: Path, suffix: str, *, prefix: str = "") -> Blob:
        """Stores a local file's bytes under a fresh name (`{prefix}{random}{suffix}`). Raises StorageError."""

        def write(stream: BinaryIO) -> None:
            with open(source, "rb") as content:
                stream.writelines(_chunks(content, str(source)))

        return self._write_fresh(folder, prefix, suffix, write, source.stat().st_size)

    def fetch_file(self, folder: str, blob: Blob, target: Path) -> None:
        """Replaces the local file `target` by the verified bytes, atomically; its folder is made where it is not there.

        Raises: MissingObjectError, DamagedObjectError; then `target` is as it was.
        """
        path = f"{folder}/{blob.name}"
        target.parent.mkdir(parents=True, exist_ok=True)

        def write(stream: BinaryIO) -> None:
            with self._fetch(path) as content:
                self._verify(content, path, blob, copy_to=stream)

        publish_file(target, write, exclusive=False, size=blob.size)

    def list(self, folder: str) -> Names:
        """Names of direct children, sorted, never from a cache. A folder that is not there is empty."""
        return self.sink.list(checked_path(folder))

    def exists(self, path: str) -> bool:
        return self.sink.exists(checked_path(path))

    def size(self, path: str) -> int | None:
        """Bytes of an object, without reading it; None where there is none."""
        return self.sink.size(checked_path(path))

    def tree(self, folder: str) -> Iterator[StoredObject]:
        """Every object below the folder, at any depth and in any order."""
        return self.sink.tree(checked_path(folder))

    def delete(self, path: str) -> None:
        """Durable and idempotent."""
        self.sink.delete(checked_path(path))

    def _believed(self, read: Callable[[], T]) -> T:
        """`read()`; damage that came over a network is believed only when it comes twice, for it may be the network's."""
        try:
            return read()
        except DamagedObjectError as error:
            if self.sink.reads_back:
                raise
            logger.info("%s; it is read once more", error)
            return read()

    def _publish_json(self, path: str, content: Mapping[str, Any], *, exclusive: bool) -> None:
        raw = document_bytes(content)

        def write(stream: BinaryIO) -> None:
            stream.write(raw)

        self.sink.publish(checked_path(path), write, exclusive=exclusive, size=len(raw))

    def _write_fresh(self, folder: str, prefix: str, suffix: str, write: Callable[[BinaryIO], None], size: int) -> Blob:
        path = checked_path(f"{folder}/{prefix}{secrets.token_hex(16)}{suffix}")
        passed = _HashingWriter()

        def write_hashed(stream: BinaryIO) -> None:
            passed.start(stream)
            write(passed)  # type: ignore[arg-type]  # it has `write`, which is all that a writer may use

        self.sink.publish(path, write_hashed, exclusive=True, size=size)
        return Blob(path.rpartition("/")[2], passed.size, passed.digest)

    def _verify(self, stream: BinaryIO, path: str, blob: Blob, copy_to: BinaryIO | None = None) -> None:
        hasher = _HashingWriter(copy_to)
        for chunk in _chunks(stream, self._name(path)):
            hasher.write(chunk)
        if hasher.size != blob.size:
            raise DamagedObjectError(f"{self._name(path)}: expected {blob.size} bytes, found {hasher.size}")
        if hasher.digest != blob.digest:
            raise DamagedObjectError(f"{self._name(path)}: expected digest {blob.digest}, found {hasher.digest}")

    def _fetch(self, path: str) -> AbstractContextManager[BinaryIO]:
        return self.sink.fetch(checked_path(path))

    def _name(self, path: str) -> str:
        return f"{self.url}/{path}"


class _HashingWriter:
    """Passes bytes through to a stream (or nowhere), counting and hashing them."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self.start(stream)

    def start(self, stream: BinaryIO | None) -> None:
        """Begins anew: a sink that retries calls its writer again from the start."""
        self._stream = stream
        self._hasher = xxhash.xxh3_128()
        self.size = 0

    def write(self, content: bytes | memoryview) -> int:
        if self._stream is not None:
            self._stream.write(content)
        self._hasher.update(content)
        count = memoryview(content).nbytes
        self.size += count
        return count

    def writelines(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            self.write(chunk)

    def flush(self) -> None:
        """The sink flushes when all is written."""

    @property
    def digest(self) -> str:
        return DIGEST_PREFIX + self._hasher.hexdigest()


def _chunks(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The stream's bytes. A read that fails raises StorageError, so that it is not taken for a failed write."""
    while True:
        try:
            chunk = stream.read(CHUNK)
        except OSError as error:
            # A disk that cannot read a sector back has damaged the object; anything else says nothing about it.
            kind = DamagedObjectError if error.errno == errno.EIO else StorageError
            raise kind(f"{name}: could not be read: {error.strerror or error}") from error
        if not chunk:
            return
        yield chunk
