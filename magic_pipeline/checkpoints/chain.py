"""A chain: a folder of sealed checkpoints, one per step, and the readers' side of it.

The trajectory is one chain, each query is one.

```
{folder}/epochs/{epoch:08d}.json                        create-only: taking it is the lease (lease.py writes)
{folder}/epochs/{epoch:08d}.released.json               create-only: its name alone says that the epoch ended
{folder}/blobs/e{epoch:08d}-{random}.pt                 written once under a fresh name
{folder}/manifests/{step:08d}.e{epoch:08d}.json         create-only: the commit of a checkpoint
{folder}/complete.e{epoch:08d}.json                     create-only: the work is finished
```
Without a manifest nothing exists. With one, every byte it names is verified before the checkpoint is given out.
Damaged, unreadable or foreign: one warning that names the object and the reason, then the one before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from magic_pipeline.checkpoints.digests import canonical_json
from magic_pipeline.checkpoints.store import Blob, Store
from magic_pipeline.errors import DamagedObjectError, MissingObjectError

if TYPE_CHECKING:
    from torch import Tensor

    from magic_pipeline.checkpoints.audit import Finding
    from magic_pipeline.checkpoints.holder import Holder
    from magic_pipeline.checkpoints.lease import Lease

logger = logging.getLogger("magic_pipeline.checkpoints")

SCHEMA = 1
COMPLETE_STEP = -1  # the `step` of the checkpoint that `complete` makes

Order = Literal["lowest", "highest"]

_EPOCH = re.compile(r"(\d{8})\.json")
_RELEASED = re.compile(r"(\d{8})\.released\.json")
_MANIFEST = re.compile(r"(\d{8})\.e(\d{8})\.json")
_COMPLETE = re.compile(r"complete\.e(\d{8})\.json")
_BLOB = re.compile(r"e(\d{8})-[0-9a-f]+\.pt")


class ForeignError(Exception):
    """The checkpoint is whole, but of other work (other facts or another schema). Never leaves this room."""


# What makes a checkpoint unusable. Storage that cannot be reached is none of it: it says nothing about the checkpoint.
UNUSABLE = (MissingObjectError, DamagedObjectError, ForeignError)


class SealedName(NamedTuple):
    """What a manifest's name says. Step COMPLETE_STEP is the complete manifest."""

    step: int
    epoch: int


@dataclass(frozen=True)
class Checkpoint:
    """A sealed checkpoint whose every byte was verified. `facts` are as sealed (tuples as lists).

    Attributes:
        step: the training step it belongs to; COMPLETE_STEP when it says that the work is finished.
        path: its manifest, relative to the store.
        blobs: part -> blob, as in `Lease.seal`.
    """

    step: int
    epoch: int
    path: str
    facts: dict[str, Any]
    blobs: dict[str, Blob]
    chain: Chain
    _read: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The part's tensors, bit for bit, on the CPU: those read with the checkpoint, else read and verified now.

        Raises: KeyError for an unknown part; MissingObjectError, DamagedObjectError when damage came since; StorageError.
        """
        if part in self._read:
            return self._read.pop(part)  # the memory is the caller's from here on
        return self.chain.store.read_blob(self.chain.blobs, self.blobs[part])


class Chain:
    """One folder of checkpoints in a store. Reading needs no lease; writing goes through `take`.

    Args:
        writers: the folder of the writers' heartbeats. Without one, a holder on another machine is waited for until
            somebody releases it by hand.
    """

    def __init__(self, store: Store, folder: str, *, writers: str | None = None) -> None:
        self.store = store
        self.folder = folder
        self.writers = writers
        self.blobs = f"{folder}/blobs"
        self.epochs = f"{folder}/epochs"
        self.manifests = f"{folder}/manifests"

    def take(self, holder: Holder | None = None) -> Lease:
        """The right to write, under a new epoch. See `lease.take` for who gets it. Raises HeldError."""
        from magic_pipeline.checkpoints.lease import take

        return take(self, holder)

    def sealed(self) -> list[SealedName]:
        """(step, epoch) of every manifest, sorted; from names alone, so damaged ones are among them."""
        matches = (_MANIFEST.fullmatch(name) for name in self.store.list(self.manifests))
        return sorted(SealedName(int(match[1]), int(match[2])) for match in matches if match)

    def completions(self) -> list[SealedName]:
        """The complete manifests, lowest epoch first; from names alone."""
        matches = (_COMPLETE.fullmatch(name) for name in self.store.list(self.folder))
        return sorted(SealedName(COMPLETE_STEP, int(match[1])) for match in matches if match)

    def load(self, step: int, expect: Mapping[str, Any], *, read: Sequence[str] = ()) -> Checkpoint | None:
        """The step's checkpoint of the highest epoch that is whole and whose facts fit; None where there is none.

        Args:
            expect: compared with the sealed facts key by key; facts that it does not name may be anything.
            read: parts whose tensors are kept from the reading that verifies them, so that they cross the network once.

        Raises: StorageError when the storage cannot be read: that says nothing about the checkpoint.
        """
        return self._first_usable((name for name in reversed(self.sealed()) if name.step == step), expect, read)

    def newest(self, expect: Mapping[str, Any], *, order: Order, read: Sequence[str] = ()) -> Checkpoint | None:
        """The first usable checkpoint: from the lowest step (a walk) or the highest (training), highest epoch first."""
        return self._first_usable(by_age(self.sealed(), order), expect, read)

    def completed(self, expect: Mapping[str, Any], *, read: Sequence[str] = ()) -> Checkpoint | None:
        """The checkpoint that says that the work is finished, highest epoch first; None when it is not."""
        return self._first_usable(reversed(self.completions()), expect, read)

    def path(self, name: SealedName) -> str:
        """The manifest's path, relative to the store."""
        if name.step == COMPLETE_STEP:
            return f"{self.folder}/complete.e{name.epoch:08d}.json"
        return f"{self.manifests}/{name.step:08d}.e{name.epoch:08d}.json"

    def verified(self, name: SealedName, read: Sequence[str] = ()) -> Checkpoint:
        """The checkpoint after reading every byte it names, with the tensors of the parts `read`.

        Raises: ForeignError for another schema; MissingObjectError, DamagedObjectError, StorageError.
        """
        return self._verified(self.manifest(name), read)

    def measured(self, name: SealedName) -> Checkpoint:
        """The checkpoint after asking for the sizes of its blobs; their bytes are not read. Raises as `verified`."""
        checkpoint = self.manifest(name)
        for blob in checkpoint.blobs.values():
            path = f"{self.blobs}/{blob.name}"
            size = self.store.size(path)
            if size is None:
                raise MissingObjectError(f"{self.store.url}/{path}: is not there")
            if size != blob.size:
                raise DamagedObjectError(f"{self.store.url}/{path}: expected {blob.size} bytes, found {size}")
        return checkpoint

    def manifest(self, name: SealedName) -> Checkpoint:
        """The checkpoint as its manifest tells it; its blobs are not looked at. Raises as `verified`."""
        path = self.path(name)
        content = self.store.read_json(path)
        if content.get("schema") != SCHEMA:
            raise ForeignError(f"expected schema {SCHEMA}, found {content.get('schema')!r}")
        try:
            found = SealedName(content["step"], content["epoch"])
            if found != name:
                raise DamagedObjectError(f"{self.store.url}/{path}: holds another checkpoint's manifest, {found}")
            blobs = {part: Blob.from_json(blob) for part, blob in content["blobs"].items()}
            return Checkpoint(name.step, name.epoch, path, dict(content["facts"]), blobs, self)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedObjectError(f"{self.store.url}/{path}: is no manifest: {error!r}") from error

    def highest_epoch(self) -> int:
        """The highest epoch that any object names (epoch objects may be removed by hand); 0 for an empty chain."""
        names = [*self.sealed(), *self.completions()]
        return max([0, *self.taken_epochs(), *(name.epoch for name in names)])

    def taken_epochs(self) -> list[int]:
        """Epochs that have an object of their own, sorted. One listing of a small folder."""
        matches = (_EPOCH.fullmatch(name) for name in self.store.list(self.epochs))
        return sorted(int(match[1]) for match in matches if match)

    def audit(self) -> list[Finding]:
        """Everything that is wrong in this folder, after reading every byte. See `audit.audit`."""
        from magic_pipeline.checkpoints.audit import audit

        return audit(self)

    def epoch_path(self, epoch: int) -> str:
        return f"{self.epochs}/{epoch:08d}.json"

    def released_path(self, epoch: int) -> str:
        return f"{self.epochs}/{epoch:08d}.released.json"

    def usable(
        self,
        name: SealedName,
        expect: Mapping[str, Any],
        *,
        parts: Container[str] | None = None,
        read: Sequence[str] = (),
    ) -> Checkpoint:
        """The checkpoint if it is whole and its facts fit.

        Args:
            parts: which of its blobs to look at; None is all. The others are for other processes to verify.
            read: parts whose tensors are kept.

        Raises: one of UNUSABLE, saying why not; StorageError when the storage cannot be read.
        """
        manifest = self.manifest(name)
        check_facts(manifest.facts, expect)  # before the blobs: foreign work is not worth reading
        return self._verified(manifest, read, parts)

    def warn_unused(self, name: SealedName, reason: object) -> None:
        """One line with the object's name and why it is not used."""
        object_name = f"{self.store.url}/{self.path(name)}"
        logger.warning("%s is not used: %s", object_name, str(reason).removeprefix(f"{object_name}: "))

    def _verified(self, checkpoint: Checkpoint, read: Sequence[str], parts: Container[str] | None = None) -> Checkpoint:
        for part, blob in checkpoint.blobs.items():
            if parts is not None and part not in parts:
                continue
            if part in read:
                checkpoint._read[part] = self.store.read_blob(self.blobs, blob)
            else:
                self.store.verify_blob(self.blobs, blob)
        return checkpoint

    def _first_usable(
        self, names: Iterable[SealedName], expect: Mapping[str, Any], read: Sequence[str]
    ) -> Checkpoint | None:
        for name in names:
            try:
                return self.usable(name, expect, read=read)
            except UNUSABLE as error:
                self.warn_unused(name, error)
        return None


def check_facts(facts: Mapping[str, Any], expect: Mapping[str, Any]) -> None:
    """Raises ForeignError naming every key of `expect` whose value in `facts` differs or is not there."""
    mismatches = []
    for key, value in expect.items():
        expected = canonical_json(value)
        found = canonical_json(facts[key]) if key in facts else "nothing"
        if expected != found:
            mismatches.append(f"{key}: expected {expected}, found {found}")
    if mismatches:
        raise ForeignError("it is of other work: " + "; ".join(mismatches))


def by_age(names: Iterable[SealedName], order: Order) -> list[SealedName]:
    """Newest first: steps in the given order, the highest epoch first within a step."""
    if order not in ("lowest", "highest"):
        raise ValueError(f"expected order 'lowest' or 'highest', found {order!r}")
    direction = 1 if order == "lowest" else -1
    return sorted(names, key=lambda name: (direction * name.step, -name.epoch))


def epoch_in_name(name: str) -> int | None:
    """The epoch that wrote an object of this name in a chain's folder; None when the name is not a chain's."""
    for pattern, group in ((_BLOB, 1), (_MANIFEST, 2), (_COMPLETE, 1), (_EPOCH, 1), (_RELEASED, 1)):
        if match := pattern.fullmatch(name):
            return int(match[group])
    return None
