"""Any other file system that fsspec knows (gs, az, sftp, ...) as storage, with what it can promise and no more.

An object is first made whole in a local temporary file and then put in one call, so that no writer's exception can
publish half of it. Whether the call itself is atomic and can be exclusive is the backend's matter: `creates_exclusively`
tries. A backend that shows half an object after a crash costs that object, no more: nothing is used unverified.
"""

from __future__ import annotations

import functools
import logging
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from magic_pipeline.checkpoints.failures import storage_error, surfaced
from magic_pipeline.checkpoints.patience import Patience, TransientError
from magic_pipeline.checkpoints.sinks import Names, StoredObject, Write
from magic_pipeline.errors import InputError, MissingObjectError, ObjectExistsError, StorageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger("magic_pipeline.checkpoints")


def open_fsspec(protocol: str, location: str, options: Mapping[str, Any]) -> FsspecSink:
    """The sink for a protocol of fsspec's. Raises InputError when fsspec does not know it or its package is missing."""
    from fsspec.core import url_to_fs

    try:
        files, root = url_to_fs(
            f"{protocol}://{location}", use_listings_cache=False, skip_instance_cache=True, **options
        )
    except ImportError as error:
        raise InputError(f"{protocol}:// needs a package that is not installed: {error}", field="storage") from None
    except ValueError:
        known = "a path, file://, s3://, memory:// and what fsspec knows (gs://, az://, ...)"
        raise InputError(f"unknown storage protocol {protocol!r}; supported are {known}", field="storage") from None
    except TypeError as error:
        raise InputError(f"{protocol}:// does not take these options: {error}", field="storage_options") from None
    except Exception as error:  # noqa: BLE001 - whatever a backend raises
        # Some connect at once. Their messages may name a user and a password.
        raise StorageError(f"{protocol}://: could not be opened: {type(error).__name__}") from None
    return FsspecSink(files, root, url=f"{protocol}://{location.rpartition('@')[2]}")


class FsspecSink:
    """A folder of an fsspec file system. Errors are those of `Sink`; what may pass is tried again (patience.py)."""

    reads_back = False

    def __init__(
        self, files: AbstractFileSystem, root: str, *, url: str | None = None, patience: Patience | None = None
    ) -> None:
        self._files, self._root = files, root.rstrip("/")
        self._url = (url or root).rstrip("/")
        self._patience = patience or Patience()

    @property
    def url(self) -> str:
        return self._url

    def publish(self, path: str, write: Write, *, exclusive: bool, size: int | None = None) -> None:
        handled = sys.exception()
        with tempfile.NamedTemporaryFile(prefix="magic-") as spool:
            try:
                write(cast(BinaryIO, spool.file))
                spool.flush()
            except BaseException as error:
                where = f"{self.url}/{path} (in {tempfile.gettempdir()})"
                reason = surfaced(error, handled, where, spool.tell(), size)
                if reason is error:
                    raise
                raise reason from (error if isinstance(reason, Exception) else None)
            self._put(spool.name, path, exclusive=exclusive)

    @contextmanager
    def fetch(self, path: str) -> Iterator[BinaryIO]:
        with tempfile.NamedTemporaryFile(prefix="magic-") as spool:
            self._call("read", path, lambda: self._files.get_file(self._at(path), spool.name))
            with open(spool.name, "rb") as stream:
                yield stream

    def list(self, folder: str) -> Names:
        try:
            found = self._call("list", folder, lambda: self._files.ls(self._at(folder), detail=False))
        except MissingObjectError:
            return []
        names = {name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != self._at(folder)}
        return sorted(name for name in names if not name.startswith("."))

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def size(self, path: str) -> int | None:
        try:
            found = self._call("look at", path, lambda: self._files.info(self._at(path)))
        except MissingObjectError:
            return None
        return int(found["size"] or 0) if found["type"] == "file" else None

    def delete(self, path: str) -> None:
        with suppress(MissingObjectError):
            self._call("delete", path, lambda: self._files.rm_file(self._at(path)))

    def tree(self, folder: str) -> Iterator[StoredObject]:
        try:
            found = self._call("list", folder, lambda: self._files.find(self._at(folder), detail=True))
        except MissingObjectError:
            return
        root = self._files._strip_protocol(self._root).rstrip("/") + "/"
        for name, details in found.items():
            yield StoredObject(name.removeprefix(root), int(details["size"] or 0), _modified(details))

    def unfinished(self, folder: str) -> Names:
        return []

    def discard_unfinished(self, folder: str, name: str) -> None:
        return

    def unfinished_tree(self, folder: str) -> Iterator[StoredObject]:
        return iter(())

    def free_bytes(self) -> int | None:
        return None

    def creates_exclusively(self) -> bool:
        """Tries a second exclusive creation of one throw-away object: it has to fail *in the backend*."""
        path = f"probe-{secrets.token_hex(8)}.json"
        try:
            with tempfile.NamedTemporaryFile(prefix="magic-") as spool:
                self._put(spool.name, path, exclusive=True)
                again = functools.partial(self._files.put_file, spool.name, self._at(path), mode="create")
                try:
                    self._call("write", path, again)
                except ObjectExistsError:
                    return True
                except StorageError as error:
                    # It failed, but not for the reason that a second writer would be told.
                    logger.info("%s: %s", self.url, error)
            return False
        finally:
            self.delete(path)

    def _put(self, source: str, path: str, *, exclusive: bool) -> None:
        target = self._at(path)

        def put() -> None:
            if exclusive and self._files.exists(target):
                raise FileExistsError(target)
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(source, target, mode="create" if exclusive else "overwrite")

        self._call("write", path, put)

    def _call(self, action: str, path: str, call: Any) -> Any:
        name = f"{self.url}/{path}"

        def once() -> Any:
            try:
                return call()
            except FileExistsError:
                raise ObjectExistsError(f"{name}: exists already, and is written only once") from None
            except (FileNotFoundError, NotADirectoryError):
                raise MissingObjectError(f"{name}: is not there") from None
            except Exception as error:
                raise self._translated(error, action, name) from error

        return self._patience.outlast(once, name)

    def _translated(self, error: Exception, action: str, name: str) -> Exception:
        told = (str(getattr(error, field, "")) for field in ("status", "status_code", "code"))
        status = next((int(text) for text in told if text.isdigit()), 0)
        if isinstance(error, TimeoutError | ConnectionError) or status == 429 or status >= 500:
            return TransientError(f"{type(error).__name__} {status or ''}".strip())
        if isinstance(error, OSError):
            return storage_error(error, name)
        return StorageError(f"{name}: could not {action} it: {type(error).__name__}")

    def _at(self, path: str) -> str:
        return str(self._files._strip_protocol(f"{self._root}/{path}".rstrip("/")))


def _modified(details: Mapping[str, Any]) -> float:
    """When the object was written, under whichever name the backend gives it; 0 where it tells nothing."""
    for field in ("mtime", "LastModified", "last_modified", "updated", "created"):
        found = details.get(field)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
        if isinstance(found, str):
            return datetime.fromisoformat(found).timestamp()
    return 0.0
