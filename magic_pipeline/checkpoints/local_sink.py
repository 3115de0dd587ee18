"""A folder of a local or POSIX network file system as storage: link or replace, with every fsync that durability takes."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from magic_pipeline.checkpoints.failures import surfaced
from magic_pipeline.checkpoints.sinks import Names, StoredObject, Write
from magic_pipeline.errors import DamagedObjectError, MissingObjectError, ObjectExistsError, StorageError

logger = logging.getLogger("magic_pipeline.checkpoints")


class LocalSink:
    """A folder on a local (or POSIX network) file system.

    A temporary file in the object's own folder, fsync, then `os.link` (create-only) or `os.replace`, then fsync of the
    folder. Temporary names start with a dot and are never listed.
    """

    reads_back = True

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
        except IsADirectoryError:
            raise DamagedObjectError(f"{target}: expected a file, found a folder") from None
        except OSError as error:
            raise StorageError(f"{target}: could not be opened: {error.strerror}") from error
        with stream:
            yield stream

    def list(self, folder: str) -> Names:
        return sorted(name for name in self._names(folder) if not name.startswith("."))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.root / path)

    def size(self, path: str) -> int | None:
        try:
            found = os.stat(self.root / path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"{self.root / path}: could not be looked at: {error.strerror}") from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def delete(self, path: str) -> None:
        target = self.root / path
        try:
            os.unlink(target)
            # Deletions are ordered (a manifest before its blobs), and only fsync keeps that order through a power cut.
            _sync_folder(target.parent)
        except (FileNotFoundError, NotADirectoryError):
            return  # it, or with it the folder, is gone already
        except OSError as error:
            raise StorageError(f"{target}: could not be deleted: {error.strerror}") from error

    def tree(self, folder: str) -> Iterator[StoredObject]:
        return (found for found in self._files(folder) if not _in_hidden(found.path))

    def unfinished(self, folder: str) -> Names:
        return sorted({_final_name(name) for name in self._names(folder) if _is_temporary(name)})

    def discard_unfinished(self, folder: str, name: str) -> None:
        for found in self._names(folder):
            if _is_temporary(found) and _final_name(found) == name:
                self.delete(f"{folder}/{found}")

    def unfinished_tree(self, folder: str) -> Iterator[StoredObject]:
        for found in self._files(folder):
            above, _, name = found.path.rpartition("/")
            if _is_temporary(name) and not _in_hidden(above):
                yield StoredObject(f"{above}/{_final_name(name)}".lstrip("/"), found.size, found.modified)

    def free_bytes(self) -> int | None:
        there = next(parent for parent in (self.root, *self.root.parents) if parent.is_dir())
        return shutil.disk_usage(there).free

    def creates_exclusively(self) -> bool:
        return True  # a file system without hard links refuses to publish at all

    def _files(self, folder: str) -> Iterator[StoredObject]:
        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise StorageError(f"{error.filename}: could not be listed: {error.strerror}") from error

        for above, _, names in os.walk(self.root / folder, onerror=failed):
            for name in names:
                path = Path(above, name)
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue  # removed while it was looked for
                except OSError as error:
                    raise StorageError(f"{path}: could not be looked at: {error.strerror}") from error
                yield StoredObject(path.relative_to(self.root).as_posix(), found.st_size, found.st_mtime)

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
        _remove_temporary(temporary)


def _remove_temporary(temporary: Path) -> None:
    """Removes it as far as the disk can: one that turned read-only or fails must not hide what is being raised."""
    try:
        temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.errno != errno.EROFS or os.path.lexists(temporary):
            logger.warning("%s stays until gc: %s", temporary, error.strerror)


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


def _in_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


def _final_name(temporary: str) -> str:
    return temporary[1:].removesuffix(".partial").rpartition(".")[0]
