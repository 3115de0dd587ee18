"""Removes an experiment from its storage, or one of its trainings: everything that is ours, and nothing else. No torch, no task.

All its chains are taken first, so that no other process can begin on them; then manifests go before what they name, so that whatever
is left when this is killed is whole and usable, or nothing. A second call goes on with what the first one left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.inventory import (
    ROLES,
    InUse,
    Inventory,
    Tell,
    Training,
    date_text,
    inventory_of,
    size_text,
)
from magic_pipeline.checkpoints.chain import Chain, epoch_in_name
from magic_pipeline.checkpoints.garbage import holder, release_first, remove_empty_folders
from magic_pipeline.checkpoints.holder import is_gone
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.errors import HeldError, InputError, MagicError


@dataclass(frozen=True)
class Deleted:
    """One training: `bytes` of sealed objects, last written at this time by the storage's clock."""

    fingerprint: str
    objects: int
    bytes: int
    written_unix: float


@dataclass(frozen=True)
class Deletion:
    """What `delete` found.

    Attributes:
        done: whether it was removed; else it would be.
        stays: paths of objects below the experiment's folder that are not ours, and stay.
        in_use: chains that a process holds, for which it would be refused.
    """

    storage: str
    done: bool
    trainings: tuple[Deleted, ...]
    stays: tuple[str, ...]
    in_use: tuple[InUse, ...]

    @property
    def objects(self) -> int:
        return sum(one.objects for one in self.trainings)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.trainings)

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        return {"objects": self.objects, "bytes": self.bytes, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """For people."""
        for one in self.trainings:
            amount = f"{one.objects} objects of {size_text(one.bytes)}"
            yield f"training {one.fingerprint[:12]}: {amount}, last written {date_text(one.written_unix)}"
        for used in self.in_use:
            yield f"in use: {used.folder} is held by {used.who}; it would be refused"
        for path in self.stays:
            yield f"stays: {path}, whose name nothing of ours writes"
        yield "stays: the experiment file, and what was exported"
        done = "deleted" if self.done else "nothing was deleted; with --yes it would be"
        stored = f"{self.objects} objects of {size_text(self.bytes)}: {done}"
        yield stored if self.trainings else f"nothing of it is stored in {self.storage}"


def delete(
    experiment: Experiment,
    *,
    fingerprint: str | None = None,
    really: bool = False,
    tell: Tell = lambda line: None,
) -> Deletion:
    """Removes all trainings of the experiment, or that one whose fingerprint begins so; without `really` it only looks.

    Raises:
        InputError: no training, or several, have such a fingerprint; a wrong storage.
        MagicError: a live process holds one of its chains; nothing was removed.
        StorageError; LeaseLostError when somebody took a chain over meanwhile (after halting this process for minutes).
    """
    inventory = inventory_of(experiment)
    trainings = _chosen(inventory, fingerprint)
    found = tuple(Deleted(one.fingerprint, len(one.objects), one.bytes, one.written) for one in trainings)
    others = (
        [*inventory.foreign, *(o for one in inventory.trainings for o in one.foreign)] if fingerprint is None else []
    )
    stays = others or [o for one in trainings for o in one.foreign]
    if not really:
        in_use = tuple(_in_use(chain for one in trainings for chain in one.chains))
        return Deletion(inventory.store.url, False, found, tuple(o.path for o in stays), in_use)
    for chain in (chain for one in trainings for chain in one.chains):
        _refuse_if_at_work(chain)  # before anything is written
    with ExitStack() as held:
        leases = {one.fingerprint: _take_all(held, one, tell) for one in trainings}
        for training in trainings:
            _remove(training, leases[training.fingerprint], tell)
    for training in trainings:
        _remove_epochs(training, leases[training.fingerprint])
        remove_empty_folders(inventory.store, training.layout.root)
    remove_empty_folders(inventory.store, inventory.folder)
    return Deletion(inventory.store.url, True, found, tuple(o.path for o in stays), ())


def _chosen(inventory: Inventory, fingerprint: str | None) -> Sequence[Training]:
    if fingerprint is None:
        return inventory.trainings
    chosen = [one for one in inventory.trainings if one.fingerprint.startswith(fingerprint)] if fingerprint else []
    if len(chosen) != 1:
        known = ", ".join(one.fingerprint[:12] for one in chosen or inventory.trainings) or "none"
        many = (
            f"{len(chosen)} trainings begin with {fingerprint!r}"
            if chosen
            else f"no training begins with {fingerprint!r}"
        )
        raise InputError(
            f"{many}; in {inventory.store.url}/{inventory.folder} there are: {known}", field="--fingerprint"
        )
    return chosen


def _in_use(chains: Iterator[Chain]) -> Iterator[InUse]:
    for chain in chains:
        at_work = holder(chain)
        if at_work is not None:
            yield InUse.by(at_work, chain)


def _take_all(held: ExitStack, training: Training, tell: Tell) -> dict[str, Lease]:
    """The leases of all chains of a training, by folder, until no other process has begun another one."""
    leases: dict[str, Lease] = {}
    while new := [chain for chain in training.listed_again().chains if chain.folder not in leases]:
        for chain in new:
            tell(f"taking {chain.folder}")
            leases[chain.folder] = _take(held, chain)
    return leases


def _refuse_if_at_work(chain: Chain) -> None:
    """Also where the holder was only halted: he would wake up in the middle of what is deleted."""
    at_work = holder(chain)
    if at_work is not None and is_gone(at_work) is False:
        raise MagicError(f"nothing was deleted: {chain.store.url}/{chain.folder} is held by {at_work}; stop it first")


def _take(held: ExitStack, chain: Chain) -> Lease:
    _refuse_if_at_work(chain)
    try:
        return held.enter_context(chain.take())
    except HeldError as error:
        raise MagicError(f"nothing was deleted: {error}") from error


def _remove(training: Training, leases: Mapping[str, Lease], tell: Tell) -> None:
    """Everything of a training by role, manifests first; but for its epochs, which keep others away until the end."""
    store = training.store
    for path in sorted({found.path for found in store.sink.unfinished_tree(training.layout.root)}):
        folder, _, name = path.rpartition("/")
        store.sink.discard_unfinished(folder, name)
    now = training.listed_again()
    for role in ROLES[: ROLES.index("heartbeat")]:
        told = ""
        for found in now.with_role(role):
            folder, chain = found.path.rpartition("/")[0], training.chain_folder(found.path)
            if chain is not None and chain not in leases:
                continue  # begun by somebody since the leases were taken
            if chain is not None:
                leases[chain].check()
            if folder != told:
                tell(folder)
            told = folder
            store.delete(found.path)


def _remove_epochs(training: Training, leases: Mapping[str, Lease]) -> None:
    """Epochs up to our own, which are released, and heartbeats of the dead.

    Who takes a chain from now on has a higher epoch, which stays.
    """
    for found in sorted(training.listed_again().with_role("epoch"), key=lambda found: release_first(found.path)):
        lease = leases.get(training.chain_folder(found.path) or "")
        epoch = epoch_in_name(found.path.rpartition("/")[2])
        if lease is not None and epoch is not None and epoch <= lease.epoch:
            training.store.delete(found.path)
    for found in training.with_role("heartbeat"):
        training.store.delete(found.path)
