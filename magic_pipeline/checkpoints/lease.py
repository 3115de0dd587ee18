"""The single writer's side of a chain: take, seal, complete, retire, clear, release.

A lease is an epoch. Before every seal, completion and deletion its holder looks for a higher epoch, and stops if there
is one. The look and the write are not one atomic act, so a holder that was overtaken in between may still land one
manifest. That is harmless: its name carries the old epoch, nothing is overwritten, and it is whole or it is not used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from magic_pipeline.checkpoints import heartbeat as heartbeats
from magic_pipeline.checkpoints.chain import (
    COMPLETE_STEP,
    SCHEMA,
    UNUSABLE,
    Chain,
    Checkpoint,
    ForeignError,
    Order,
    SealedName,
    by_age,
    epoch_in_name,
)
from magic_pipeline.checkpoints.digests import plain
from magic_pipeline.checkpoints.heartbeat import Heartbeat
from magic_pipeline.checkpoints.holder import Holder, is_gone, is_stopped
from magic_pipeline.checkpoints.patience import at_most
from magic_pipeline.checkpoints.store import Blob
from magic_pipeline.errors import (
    DamagedObjectError,
    HeldError,
    LeaseLostError,
    MagicError,
    MissingObjectError,
    ObjectExistsError,
    StorageError,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("magic_pipeline.checkpoints")


def take(chain: Chain, holder: Holder | None = None) -> Lease:
    """The lease under a new epoch, if nobody else has it.

    The holder of the highest epoch is asked for. Released, or its process provably gone: taken over at once. This very
    process: a new epoch too, and the former lease is lost (a process that starts over must not wait for itself).
    A process on another machine, or one that is halted: its heartbeat is watched, and it is overtaken once that has
    stopped for heartbeat.EXPIRY. An epoch object that is damaged names nobody: it is taken over with a warning, since
    waiting for an unknown holder could last for ever, and a live one notices before its next seal.

    Raises:
        HeldError: the holder lives, or nobody can tell (then it says how to release it by hand).
    """
    holder = holder or Holder.this_process()
    with ExitStack() as undo:
        heartbeat = None
        while True:
            epoch = chain.highest_epoch()
            current = _holder(chain, epoch, holder)
            if current is not None:
                _refuse_if_alive(chain, epoch, current)
            if chain.writers is not None and heartbeat is None:
                chain.store.warn_unless_exclusive()
                heartbeat = heartbeats.hold(chain.store, chain.writers)
                undo.callback(heartbeats.let_go, heartbeat)
                holder = replace(holder, heartbeat=heartbeat.process)
            try:
                chain.store.create_json(chain.epoch_path(epoch + 1), holder.as_json())
                break
            except ObjectExistsError:
                continue  # another process took it between the look and the write: now ask for that one
        undo.pop_all()
        # From here on an interrupt gives it back: a process that goes on would else keep everybody waiting.
        lease = undo.enter_context(Lease(chain, epoch + 1, holder, heartbeat))
        try:
            lease.discard_unfinished()
        except StorageError as error:  # only space is lost; the lease is taken all the same
            logger.warning("%s/%s: what killed writers left stays: %s", chain.store.url, chain.folder, error)
        undo.pop_all()
    return lease


def live_holder(chain: Chain) -> dict[str, object] | None:
    """Who holds the chain's lease and is alive, or cannot be told gone; None for nobody and for this very process.

    Looks once and watches nobody, so a holder elsewhere counts as alive until it is overtaken.
    """
    holder = _holder(chain, chain.highest_epoch(), Holder.this_process())
    return None if holder is None or is_gone(holder) else holder.as_json()


def refuse_if_held(chain: Chain) -> None:
    """Nothing where the lease could be taken, found out as `take` does. Raises HeldError."""
    epoch = chain.highest_epoch()
    current = _holder(chain, epoch, Holder.this_process())
    if current is not None:
        _refuse_if_alive(chain, epoch, current)


def _holder(chain: Chain, epoch: int, asking: Holder) -> Holder | None:
    """Whom the epoch names; None where it is free to take: released, damaged, or held by the process that asks."""
    if epoch == 0 or chain.store.exists(chain.released_path(epoch)):
        return None
    try:
        holder = Holder.from_json(chain.store.read_json(chain.epoch_path(epoch)))
    except (MissingObjectError, DamagedObjectError, KeyError, TypeError) as error:
        path = f"{chain.store.url}/{chain.epoch_path(epoch)}"
        logger.warning("%s does not say who holds the lease, so it is taken over: %s", path, error)
        return None
    return None if holder.is_same_process(asking) else holder


def _refuse_if_alive(chain: Chain, epoch: int, holder: Holder) -> None:
    gone = is_gone(holder)
    if gone:
        return
    where = f"{chain.store.url}/{chain.folder}"
    if gone is False and not is_stopped(holder):
        why = "which is running"
    elif not holder.heartbeat or chain.writers is None:
        why = "which this machine cannot look at"
    elif heartbeats.is_beating(chain.store, chain.writers, holder.heartbeat):
        why = "which gives signs of life"
    else:
        logger.warning(
            "%s: %s has given no sign of life for %.0f s and is overtaken", where, holder, heartbeats.expiry_seconds()
        )
        return
    release = f"{chain.store.url}/{chain.released_path(epoch)}"
    raise HeldError(
        f"{where}: held by {holder}, {why}; once it has ended for certain, release it by creating an empty object {release}",
        holder=holder.as_json(),
    )


class Lease:
    """The right to write to a chain. Its operations are serialised by a lock, so a background thread may seal.

    Attributes:
        epoch: the current epoch. It rises when a damaged checkpoint of this lease's own epoch is sealed again.
    """

    def __init__(self, chain: Chain, epoch: int, holder: Holder, heartbeat: Heartbeat | None = None) -> None:
        self.chain = chain
        self.epoch = epoch
        self.holder = holder
        self._own_epochs = {epoch}
        self._released = False
        self._heartbeat = heartbeat
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the lease. Storage that is away meanwhile is warned about: it must not hide why the work ended."""
        try:
            with at_most(heartbeats.TO_LET_GO):
                self.release()
        except MagicError as failed:
            logger.warning(
                "the lease of epoch %d is not given back, and ends with this process: %s", self.epoch, failed
            )

    def seal(self, step: int, parts: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> Checkpoint:
        """Commits a checkpoint: every part's blob, durable, then the manifest, create-only.

        When this raises or the process dies, the step is as it was before, except for blobs that no manifest names
        (`sweep` removes them). A checkpoint of this step and epoch that turned out damaged is sealed again under a new
        epoch; the damaged one stays for `retire` and `clear`.

        Args:
            step: 0 to 99,999,999.
            parts: part ("rank0") -> name -> tensor.
            facts: JSON values that a reader must expect.

        Raises: LeaseLostError; ObjectExistsError when the step is sealed in this epoch and whole; StorageError.
        """
        if not 0 <= step < 10**8:
            raise ValueError(f"expected a step from 0 to 99999999, found {step}")
        return self._commit(step, parts, facts)

    def complete(self, parts: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> Checkpoint:
        """Commits the end of the work, as `seal` commits a step; `Chain.completed` finds it."""
        return self._commit(COMPLETE_STEP, parts, facts)

    def check(self) -> None:
        """Raises LeaseLostError when there is a higher epoch, this one's object is gone or another's, or the lease was released."""
        where = f"{self.chain.store.url}/{self.chain.folder}"
        if self._released:
            raise LeaseLostError(f"{where}: epoch {self.epoch} was released")
        taken = self.chain.taken_epochs()
        if taken and taken[-1] > self.epoch:
            raise LeaseLostError(f"{where}: epoch {self.epoch} was taken over by epoch {taken[-1]}")
        # Where everything was deleted the epochs start again from 1, so that a number alone may be somebody else's.
        try:
            holder = self.chain.store.read_json(self.chain.epoch_path(self.epoch))
        except MissingObjectError:
            raise LeaseLostError(f"{where}: the object of epoch {self.epoch} was removed") from None
        except DamagedObjectError:
            return  # it names nobody, and whoever takes it over takes a higher epoch
        if holder != self.holder.as_json():
            raise LeaseLostError(f"{where}: what epoch {self.epoch} was taken for was deleted, and it is another's now")

    @contextmanager
    def unless_lost(self) -> Iterator[None]:
        """Within, storage that fails raises LeaseLostError where the lease is lost: the new holder's clean-up makes it fail."""
        try:
            yield
        except StorageError:
            with suppress(StorageError):
                self.check()
            raise

    def retire(self, *, order: Order, keep: int = 2) -> None:
        """Removes this lease's own checkpoints but the newest `keep` steps; safe to repeat and to be killed in.

        The newest is read and verified first: while it is damaged nothing is removed, with a warning. Each manifest
        goes before its blobs, so what is half removed does not exist.

        Raises: LeaseLostError, StorageError.
        """
        if keep < 1:
            raise ValueError(f"expected to keep at least one generation, found {keep}")
        with self._lock:
            own = by_age((name for name in self.chain.sealed() if name.epoch in self._own_epochs), order)
            steps = list(dict.fromkeys(name.step for name in own))
            kept = [next(name for name in own if name.step == step) for step in steps[:keep]]
            superseded = [name for name in reversed(own) if name not in kept]
            if superseded and self._is_whole(kept[0]):
                self._remove(superseded)

    def clear(self, expect: Mapping[str, Any] | None = None) -> None:
        """Once complete: removes all of own and older epochs but the complete manifest and its blobs.

        Safe to repeat and to be killed in.

        Args:
            expect: facts that the complete manifest must have, as for `Chain.completed`.

        Raises: StorageError when no complete manifest verifies (then nothing is removed); LeaseLostError.
        """
        with self._lock:
            complete = self.chain.completed(expect or {})
            if complete is None:
                raise StorageError(
                    f"{self.chain.store.url}/{self.chain.folder}: nothing is cleared, for it is not complete"
                )
            kept = SealedName(complete.step, complete.epoch)
            names = [*self.chain.sealed(), *self.chain.completions()]
            self._remove(name for name in names if name.epoch <= self.epoch and name != kept)
            self.sweep()

    def sweep(self) -> None:
        """Removes what killed writers of own and older epochs left: unnamed blobs, unfinished publications.

        A manifest that cannot be read keeps all blobs of its epoch: another schema's for good, and one that is found
        damaged because the reading itself may have been (a bit that flipped on the way, a disk that answers EIO). Safe
        to repeat and to be killed in.

        Raises: LeaseLostError, StorageError.
        """
        with self._lock:
            self.check()
            store, chain = self.chain.store, self.chain
            named, opaque = set[str](), set[int]()
            for name in [*chain.sealed(), *chain.completions()]:
                try:
                    named.update(blob.name for blob in chain.manifest(name).blobs.values())
                except UNUSABLE as error:
                    logger.warning("%s/%s: blobs of its epoch stay: %s", store.url, chain.path(name), error)
                    opaque.add(name.epoch)
            for blob in store.list(chain.blobs):
                if blob not in named and self._is_ours_to_remove(blob) and epoch_in_name(blob) not in opaque:
                    self.check()
                    store.delete(f"{chain.blobs}/{blob}")
            self.discard_unfinished()

    def discard_unfinished(self) -> None:
        """Frees what unfinished publications of own and older epochs take (part of `sweep`; listings only)."""
        for folder in (self.chain.blobs, self.chain.manifests, self.chain.epochs, self.chain.folder):
            for name in self.chain.store.sink.unfinished(folder):
                if self._is_ours_to_remove(name):
                    self.chain.store.sink.discard_unfinished(folder, name)

    def release(self) -> None:
        """Ends the lease, so that the next `take` succeeds at once. Idempotent; this lease writes no more."""
        with self._lock:
            if self._released:
                return
            heartbeat, self._heartbeat = self._heartbeat, None  # an interrupt here must not let go of it twice
            if heartbeat is not None:
                heartbeats.let_go(heartbeat)
            try:
                self.chain.store.create_json(self.chain.released_path(self.epoch), self.holder.as_json())
            except ObjectExistsError:
                logger.info("%s was released already", self.chain.released_path(self.epoch))
            self._released = True

    def begin(self, step: int) -> str:
        """The prefix under which the blobs of a checkpoint are written, by this process or by others on its behalf.

        A checkpoint of this step and epoch that turned out damaged is left behind under a new epoch.

        Raises: LeaseLostError; ObjectExistsError when the step is sealed in this epoch and whole; StorageError.
        """
        with self._lock:
            self.check()
            if self.chain.store.exists(self.chain.path(SealedName(step, self.epoch))):
                self._leave_damage(SealedName(step, self.epoch))
            return f"e{self.epoch:08d}-"

    def commit(self, step: int, blobs: Mapping[str, Blob], facts: Mapping[str, Any]) -> Checkpoint:
        """Seals what was written since `begin`: every blob is durable, and now the manifest says so. Raises as `seal`."""
        sealed_facts: dict[str, Any] = plain(facts, "facts")
        with self._lock:
            self.check()  # writing blobs may have taken minutes
            name = SealedName(step, self.epoch)
            content = {
                "schema": SCHEMA,
                "step": step,
                "epoch": self.epoch,
                "facts": sealed_facts,
                "blobs": {part: blob.as_json() for part, blob in blobs.items()},
            }
            with self.unless_lost():
                self.chain.store.create_json(self.chain.path(name), content)
            return Checkpoint(step, self.epoch, self.chain.path(name), sealed_facts, dict(blobs), self.chain)

    def _commit(self, step: int, parts: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> Checkpoint:
        plain(facts, "facts")  # a fact that has no JSON form is found before anything is written
        with self._lock:
            prefix = self.begin(step)
            with self.unless_lost():
                blobs = {
                    part: self.chain.store.write_blob(self.chain.blobs, tensors, prefix=prefix)
                    for part, tensors in parts.items()
                }
            return self.commit(step, blobs, facts)

    def _leave_damage(self, name: SealedName) -> None:
        """Takes a new epoch when the checkpoint of this name is damaged. Raises ObjectExistsError when it is whole."""
        try:
            self.chain.verified(name)
        except UNUSABLE as error:
            logger.warning(
                "%s/%s is sealed again under a new epoch: %s", self.chain.store.url, self.chain.path(name), error
            )
        else:
            raise ObjectExistsError(f"{self.chain.store.url}/{self.chain.path(name)}: is sealed already, and whole")
        epoch = self.chain.highest_epoch() + 1
        try:
            self.chain.store.create_json(self.chain.epoch_path(epoch), self.holder.as_json())
        except ObjectExistsError:
            raise LeaseLostError(f"{self.chain.store.url}/{self.chain.folder}: taken over by epoch {epoch}") from None
        self.epoch = epoch
        self._own_epochs.add(epoch)

    def _is_whole(self, name: SealedName) -> bool:
        """Whether it can be relied on: read back where that is cheap; elsewhere the upload was checked, and its size is."""
        try:
            if self.chain.store.sink.reads_back:
                self.chain.verified(name)
            else:
                self.chain.measured(name)
        except UNUSABLE as error:
            logger.warning("%s: nothing older is removed, for %s", self.chain.path(name), error)
            return False
        return True

    def _remove(self, names: Iterable[SealedName]) -> None:
        for name in names:
            blobs = self._blobs(name)
            if blobs is None:
                continue
            self.check()
            self.chain.store.delete(self.chain.path(name))
            for blob in blobs:
                self.chain.store.delete(f"{self.chain.blobs}/{blob.name}")

    def _blobs(self, name: SealedName) -> list[Blob] | None:
        """What the manifest names; empty where it is damaged or gone, so that its blobs are left to `sweep`.

        None, with a warning, where it has a schema that this program cannot read: then it is not ours to remove.
        """
        try:
            return list(self.chain.manifest(name).blobs.values())
        except (MissingObjectError, DamagedObjectError):
            return []
        except ForeignError as error:
            logger.warning("%s/%s is kept: %s", self.chain.store.url, self.chain.path(name), error)
            return None

    def _is_ours_to_remove(self, object_name: str) -> bool:
        epoch = epoch_in_name(object_name)
        return epoch is not None and epoch <= self.epoch
