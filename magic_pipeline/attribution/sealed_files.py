"""Files in the store (Parquet sheets) with a manifest each: written once, verified when read, replaced under a new number if damaged.

No torch. The manifest is the commit: a file without one does not exist.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magic_pipeline.checkpoints.store import Blob, Store
from magic_pipeline.errors import DamagedObjectError, MissingObjectError, ObjectExistsError

logger = logging.getLogger("magic_pipeline.attribution")


@dataclass(frozen=True)
class SealedFile:
    """A verified file: its path in the store and what was sealed about it."""

    folder: str
    blob: Blob
    facts: Mapping[str, Any]

    @property
    def path(self) -> str:
        return f"{self.folder}/blobs/{self.blob.name}"


def find_file(store: Store, folder: str, name: str) -> SealedFile | None:
    """The newest whole file of this name; damaged ones are warned about and passed over."""
    for manifest in reversed(_manifests(store, folder, name)):
        try:
            return read_manifest(store, folder, manifest)
        except (DamagedObjectError, MissingObjectError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s/%s/manifests/%s is not used: %s", store.url, folder, manifest, error)
    return None


def read_manifest(store: Store, folder: str, manifest: str) -> SealedFile:
    """What one manifest names, every byte verified. Raises DamagedObjectError, MissingObjectError, KeyError, TypeError, ValueError."""
    path = f"{folder}/manifests/{manifest}"
    content = store.read_json(path)
    if content["name"] != manifest.rpartition(".e")[0]:
        # Whole, but in another one's place: its file would be taken for that one's.
        raise DamagedObjectError(f"{store.url}/{path}: holds the manifest of another file, {content['name']}")
    found = SealedFile(folder, Blob.from_json(content["blob"]), content["facts"])
    store.verify_blob(f"{folder}/blobs", found.blob)
    return found


def seal_file(store: Store, folder: str, name: str, source: Path, facts: Mapping[str, Any]) -> SealedFile:
    """Stores a local file and seals it under the first free number of its name."""
    blob = store.write_file(f"{folder}/blobs", source, source.suffix)
    number = len(_manifests(store, folder, name))
    while True:
        try:
            path = f"{folder}/manifests/{name}.e{number:08d}.json"
            store.create_json(path, {"name": name, "blob": blob.as_json(), "facts": dict(facts)})
            return SealedFile(folder, blob, dict(facts))
        except ObjectExistsError:
            number += 1


def _manifests(store: Store, folder: str, name: str) -> list[str]:
    return [found for found in store.list(f"{folder}/manifests") if found.startswith(f"{name}.e")]
