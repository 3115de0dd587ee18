"""Score files that nobody reads any more: older copies, those of walks that were walked again, and blobs without a manifest.

They are freed without a lease, for none is taken to write them. Nothing can be lost by it: a whole file of the same scores stays, and a
score file that is missing is made again from its finished walk, whose checkpoint stays too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magic_pipeline.attribution.needed import DAMAGED, SUPERSEDED
from magic_pipeline.attribution.sealed_files import SealedFile, read_manifest
from magic_pipeline.checkpoints.garbage import Garbage, Reason
from magic_pipeline.checkpoints.sinks import StoredObject
from magic_pipeline.checkpoints.store import Blob, Store
from magic_pipeline.errors import DamagedObjectError, MissingObjectError

ORPHANED = Reason("orphaned", "no manifest names it, and it is too old for one to come")


@dataclass(frozen=True)
class _Copy:
    """A manifest of a score file: its blob where it can be read, the whole file where every byte is there."""

    manifest: str
    blob: Blob | None
    file: SealedFile | None


def stale_scores(
    store: Store,
    folder: str,
    listed: Sequence[StoredObject],
    *,
    replaced_by: Callable[[str, SealedFile], str | None],
    before: float,
) -> list[Garbage]:
    """What can go of a folder of score files, manifests before their blobs.

    Args:
        replaced_by: the name of the file that is read in place of this one (its name and content); None where it is read itself,
            or is the only one of its kind.
        before: a blob that no manifest names goes if it was last written before this time.
    """
    sizes = {found.path: found.size for found in listed}
    copies = _copies(store, folder, listed)
    whole = {name: next((one for one in found if one.file is not None), None) for name, found in copies.items()}
    garbage: list[Garbage] = []

    def drop(one: _Copy, reason: Reason) -> None:
        blob = [] if one.blob is None else [f"{folder}/blobs/{one.blob.name}"]
        garbage.extend(Garbage(p, sizes[p], reason) for p in [one.manifest, *blob] if p in sizes)

    for name, found in copies.items():
        kept = whole[name]
        if kept is None or kept.file is None:
            continue  # damaged, and made again by the next run
        other = replaced_by(name, kept.file)
        gone = other is not None and whole.get(other) is not None
        for one in found:
            if one is not kept or gone:
                drop(one, DAMAGED if one.file is None else SUPERSEDED)
    named = {f"{folder}/blobs/{one.blob.name}" for found in copies.values() for one in found if one.blob is not None}
    blobs = [o for o in listed if o.path.rpartition("/")[0] == f"{folder}/blobs" and o.path not in named]
    return garbage + [Garbage(o.path, o.size, ORPHANED) for o in blobs if o.modified < before]


def _copies(store: Store, folder: str, listed: Sequence[StoredObject]) -> dict[str, list[_Copy]]:
    """By the file's name, the newest first."""
    found: dict[str, list[_Copy]] = defaultdict(list)
    manifests = [o.path for o in listed if o.path.rpartition("/")[0] == f"{folder}/manifests"]
    for path in sorted(manifests, reverse=True):
        manifest = path.rpartition("/")[2]
        found[manifest.rpartition(".e")[0]].append(_Copy(path, *_look(store, folder, manifest)))
    return found


def _look(store: Store, folder: str, manifest: str) -> tuple[Blob | None, SealedFile | None]:
    blob = None
    try:
        blob = Blob.from_json(store.read_json(f"{folder}/manifests/{manifest}")["blob"])
        return blob, read_manifest(store, folder, manifest)
    except (DamagedObjectError, MissingObjectError, KeyError, TypeError, ValueError):
        return blob, None
