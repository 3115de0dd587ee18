"""The queries file, wherever it lies: on this machine, or in an object store that others write it to. No torch."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import InputError, MissingObjectError

_MOST_BYTES = 256 * 2**20


def local_queries_file(experiment: Experiment) -> Path | None:
    """The file that `queries.file` names; where that is a URL, a copy of what lies there now, in `.magic/queries` beside the experiment
    file, or where that folder cannot be written (a mounted volume), in one of this process. None where the queries come from elsewhere.

    A URL is read with the experiment's `storage_options` where both are of one protocol, else with what the environment gives.

    Raises:
        InputError: there is no such object, or it is no queries file by its size.
        StorageError: it cannot be read.
    """
    file = experiment.queries.file
    if file is None or "://" not in file:
        return None if file is None else experiment.resolve(file)
    content = _read(experiment, file)
    name = f"{hashlib.sha256(file.encode()).hexdigest()[:8]}-{file.rpartition('/')[2]}"
    copy = _folder_of_copies(experiment.folder) / name
    if not copy.exists() or copy.read_bytes() != content:
        # Written aside and renamed: other processes read it meanwhile.
        descriptor, aside = tempfile.mkstemp(dir=copy.parent, suffix=".tmp")
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
        os.replace(aside, copy)
    return copy


def _folder_of_copies(beside: Path) -> Path:
    folder = beside / ".magic" / "queries"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else _own_folder()


@cache
def _own_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="magic-pipeline-queries-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _read(experiment: Experiment, url: str) -> bytes:
    folder, _, name = url.rpartition("/")
    same = url.partition("://")[0] == experiment.storage.partition("://")[0]
    try:
        store = Store(folder, options=(experiment.storage_options or None) if same else None)
    except InputError as error:
        raise InputError(str(error), file=experiment.path, field="queries.file") from None
    size = store.sink.size(name) if name else None
    if size is None:
        raise InputError("there is no such object", file=url, field="queries.file")
    if size > _MOST_BYTES:
        raise InputError(f"has {size} bytes, which is no list of queries", file=url, field="queries.file")
    try:
        with store.sink.fetch(name) as stream:
            return stream.read()
    except MissingObjectError:
        raise InputError("there is no such object", file=url, field="queries.file") from None
