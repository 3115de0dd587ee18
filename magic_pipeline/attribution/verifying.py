"""Reads back and hashes everything that is sealed of an experiment, and says what each fault costs. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magic_pipeline.attribution.sealed_files import read_manifest
from magic_pipeline.checkpoints.chain import Chain, ForeignError, SealedName
from magic_pipeline.errors import DamagedObjectError, MissingObjectError, StorageError

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment


@dataclass(frozen=True)
class Finding:
    """A fault: the object (a path in the store), what is wrong with it, and what that costs."""

    object: str
    problem: str
    consequence: str


@dataclass(frozen=True)
class Verification:
    """What was read: `checked` objects of `bytes` bytes."""

    findings: tuple[Finding, ...]
    checked: int
    bytes: int


_CONSEQUENCE = {
    "damaged": "it is not used; a run goes on from the one before and seals it again",
    "orphaned": "it takes space and nothing reads it",
    "foreign-schema": "another version of magic_pipeline wrote it; it is not used",
}


def verify_experiment(opened: OpenExperiment) -> Verification:
    """Every chain, plan, score file and description of this training fingerprint."""
    reader = _Reader(opened)
    findings = [
        *reader.documents(),
        *reader.chains(),
        *reader.files(opened.layout.scores),
        *reader.files(opened.layout.matrix),
    ]
    return Verification(tuple(findings), reader.checked, reader.bytes)


class _Reader:
    def __init__(self, opened: OpenExperiment) -> None:
        self.opened, self.store, self.layout = opened, opened.store, opened.layout
        self.checked = self.bytes = 0

    def documents(self) -> Iterator[Finding]:
        """experiment.json, queries.json, walk plans and the ledger."""
        layout = self.layout
        paths = [path for path in (layout.description, layout.queries) if self.store.exists(path)]
        paths += [f"{layout.ledger}/{name}" for name in self.store.list(layout.ledger)]
        for key, digest in self._walks():
            folder = layout.plans(key, digest)
            paths += [f"{folder}/{name}" for name in self.store.list(folder)]
        for path in paths:
            self.checked += 1
            try:
                self.store.read_json(path)
            except (DamagedObjectError, MissingObjectError) as error:
                yield Finding(path, str(error), "it is not used; what needs it is made again")

    def chains(self) -> Iterator[Finding]:
        """The trajectory, and the walk of every query that the store holds, also of queries that are no longer asked."""
        folders = [self.layout.trajectory, *(self.layout.query(key, digest) for key, digest in self._walks())]
        for folder in folders:
            chain = Chain(self.store, folder)
            for name in [*chain.sealed(), *chain.completions()]:
                self.checked += 1
                self.bytes += self._bytes_of(chain, name)
            for found in chain.audit():
                yield Finding(found.object, f"{found.kind}: {found.detail}", _CONSEQUENCE[found.kind])

    def files(self, folder: str) -> Iterator[Finding]:
        """Score sheets or the matrix."""
        for name in self.store.list(f"{folder}/manifests"):
            self.checked += 1
            try:
                self.bytes += read_manifest(self.store, folder, name).blob.size
            except (DamagedObjectError, MissingObjectError, KeyError, TypeError, ValueError) as error:
                yield Finding(
                    f"{folder}/manifests/{name}", str(error), "it is not used; it is made again from the finished walk"
                )

    def _walks(self) -> Iterator[tuple[str, str]]:
        for key in self.store.list(f"{self.layout.root}/queries"):
            for digest in self.store.list(f"{self.layout.root}/queries/{key}"):
                yield key, digest

    def _bytes_of(self, chain: Chain, name: SealedName) -> int:
        try:
            return sum(blob.size for blob in chain.manifest(name).blobs.values())
        except (ForeignError, StorageError):
            return 0
