"""What of a chain nobody needs any more, and its removal under a lease. Which checkpoints are needed is for the caller to say.

A manifest goes before its blobs, so what is half removed does not exist, and a removal that was killed is begun anew by the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from magic_pipeline.checkpoints.chain import Chain, ForeignError, SealedName, epoch_in_name
from magic_pipeline.checkpoints.holder import Holder, is_gone
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.checkpoints.local_sink import LocalSink
from magic_pipeline.checkpoints.sinks import StoredObject
from magic_pipeline.checkpoints.store import Blob, Store
from magic_pipeline.errors import DamagedObjectError, MissingObjectError


class Reason(NamedTuple):
    """Why something is garbage: a word for scripts, and a sentence for people."""

    kind: str
    why: str


ORPHANED = Reason("orphaned", "no manifest names it, and its writer has ended")
OLD_EPOCH = Reason("epoch", "the work is finished: who wrote it when is of no use any more")
DAMAGED_EPOCH = Reason("damaged", "it should say who holds the lease, and cannot be read")


@dataclass(frozen=True)
class Garbage:
    """An object that can be removed."""

    path: str
    size: int
    reason: Reason


def holder(chain: Chain) -> Holder | None:
    """Who holds the chain's lease and has not provably ended, this very process included; None for nobody."""
    epoch = chain.highest_epoch()
    return None if epoch == 0 else _living(chain, epoch)


def chain_garbage(
    chain: Chain,
    listed: Sequence[StoredObject],
    unneeded: Mapping[SealedName, Reason],
    *,
    before: float,
    finished: bool,
    lease: Lease | None = None,
) -> list[Garbage]:
    """What can go of a chain that nobody writes to, in the order in which it must go.

    Args:
        listed: the chain's objects.
        unneeded: checkpoints to remove. One of a schema that this program cannot read is kept with all blobs of its epoch.
        before: an unnamed blob goes only if it was last written before this time and the holder of its epoch has ended.
        finished: whether the work is complete, so that only the newest epoch's object matters.
        lease: held by the caller, whose own epoch stays; None for a forecast, which counts as if there were one.
    """
    sizes = {found.path: found.size for found in listed}
    blobs = {name: _blobs(chain, name) for name in [*chain.sealed(), *chain.completions()]}
    removed = {name: reason for name, reason in unneeded.items() if blobs.get(name) is not None}
    # What a manifest that stays names and this program cannot read, may be any blob of its epoch.
    doubtful = {name.epoch for name, named in blobs.items() if not named and name not in removed}
    kept = {blob.name for name, named in blobs.items() if name not in removed for blob in named or ()}
    garbage = []
    for name, reason in removed.items():
        garbage.append(Garbage(chain.path(name), sizes.get(chain.path(name), 0), reason))
        paths = [f"{chain.blobs}/{blob.name}" for blob in blobs[name] or () if blob.name not in kept]
        garbage += [Garbage(path, sizes[path], reason) for path in paths if path in sizes]
    named = kept | {item.path.rpartition("/")[2] for item in garbage}
    garbage += _orphans(chain, listed, named, doubtful, before)
    return garbage + _epochs(chain, listed, finished, bool(garbage), lease)


def remove(lease: Lease, garbage: Iterable[Garbage]) -> None:
    """Removes garbage of the lease's chain. Raises LeaseLostError as soon as the lease is, StorageError."""
    for item in garbage:
        lease.check()
        lease.chain.store.delete(item.path)


def release_first(path: str) -> tuple[int, bool]:
    """The order in which epoch objects may be removed: from the lowest epoch on, and that it was released before that it was taken.

    What says "released" of an epoch that is no more would say it of one that takes this number later.
    """
    name = path.rpartition("/")[2]
    return epoch_in_name(name) or 0, not name.endswith(".released.json")


def remove_empty_folders(store: Store, folder: str) -> None:
    """On a local disk, removes the folders that hold nothing, this one included; elsewhere there are none."""
    if not isinstance(store.sink, LocalSink):
        return
    top = Path(store.sink.root, folder)
    for above, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):
            Path(above).rmdir()


def _orphans(
    chain: Chain, listed: Sequence[StoredObject], named: set[str], doubtful: set[int], before: float
) -> list[Garbage]:
    living: dict[int, bool] = {}
    garbage = []
    for found in listed:
        folder, _, name = found.path.rpartition("/")
        epoch = epoch_in_name(name)
        if folder != chain.blobs or epoch is None or epoch in doubtful or name in named or found.modified >= before:
            continue
        if epoch not in living:
            living[epoch] = _lives(chain, epoch)
        if not living[epoch]:
            garbage.append(Garbage(found.path, found.size, ORPHANED))
    return garbage


def _epochs(
    chain: Chain, listed: Sequence[StoredObject], finished: bool, other: bool, lease: Lease | None
) -> list[Garbage]:
    epochs = {found: epoch_in_name(found.path.rpartition("/")[2]) for found in listed if _is_epoch(chain, found)}
    # Whoever removes something takes a new epoch, so that without a lease all that there are now will be older ones.
    older = [found for found, epoch in epochs.items() if epoch is not None and (lease is None or epoch < lease.epoch)]
    older.sort(key=lambda found: release_first(found.path))
    unreadable = [found for found in older if _is_unreadable(chain, found)]
    superseded = any(epoch is not None and epoch < chain.highest_epoch() for epoch in epochs.values())
    if finished and (lease is not None or other or unreadable or superseded):
        return [Garbage(found.path, found.size, OLD_EPOCH) for found in older]
    return [Garbage(found.path, found.size, DAMAGED_EPOCH) for found in unreadable]


def _is_epoch(chain: Chain, found: StoredObject) -> bool:
    return found.path.startswith(f"{chain.epochs}/")


def _is_unreadable(chain: Chain, found: StoredObject) -> bool:
    if found.path.endswith(".released.json"):
        return False  # its name alone counts
    try:
        Holder.from_json(chain.store.read_json(found.path))
    except (DamagedObjectError, KeyError, TypeError):
        return True
    except MissingObjectError:
        return False
    return False


def _living(chain: Chain, epoch: int) -> Holder | None:
    """Who took the epoch, has not released it and has not provably ended."""
    if chain.store.exists(chain.released_path(epoch)):
        return None
    try:
        found = Holder.from_json(chain.store.read_json(chain.epoch_path(epoch)))
    except (MissingObjectError, DamagedObjectError, KeyError, TypeError):
        return None
    return None if is_gone(found) else found


def _lives(chain: Chain, epoch: int) -> bool:
    """Whether the epoch's holder is at work on this machine. One elsewhere was overtaken when its heartbeat stopped."""
    found = _living(chain, epoch)
    return found is not None and is_gone(found) is False


def _blobs(chain: Chain, name: SealedName) -> list[Blob] | None:
    """As in Lease: empty where the manifest cannot be read, so that its blobs are orphans; None for another schema."""
    try:
        return list(chain.manifest(name).blobs.values())
    except (MissingObjectError, DamagedObjectError):
        return []
    except ForeignError:
        return None
