"""Garbage collection of an experiment's storage: finds what nobody needs any more, and frees it if asked to. No torch, no task.

What a live process writes is left alone and named. Each chain is cleaned under its lease, as by any other writer; heartbeats,
score files, ledger entries and unfinished publications have none, and the functions that free them say why that is safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from magic_pipeline.attribution.expectations import of_training, of_walk
from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.inventory import (
    InUse,
    Inventory,
    Tell,
    Training,
    Walk,
    date_text,
    inventory_of,
    size_text,
)
from magic_pipeline.attribution.needed import Judge, Unneeded
from magic_pipeline.attribution.sealed_files import SealedFile
from magic_pipeline.attribution.stale_scores import stale_scores
from magic_pipeline.attribution.status import QueryStatus, expected_matrix_digest, sheet_name
from magic_pipeline.checkpoints.chain import Chain, Checkpoint, epoch_in_name
from magic_pipeline.checkpoints.garbage import Garbage, Reason, chain_garbage, holder, remove
from magic_pipeline.checkpoints.holder import Holder, is_gone
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.checkpoints.sinks import StoredObject
from magic_pipeline.errors import DamagedObjectError, HeldError, MissingObjectError

UNFINISHED = Reason("unfinished", "its publication was begun and not finished")
HEARTBEAT = Reason("heartbeat", "its process has ended")
UNREADABLE = Reason("damaged", "it cannot be read, and nothing needs it")

HOURS = 24.0  # an object that nothing names is left alone for so long, for its writer may be about to seal it


@dataclass(frozen=True)
class Freed:
    """Objects of one training that are (or would be) freed for one reason."""

    kind: str
    why: str
    training: str
    objects: int
    bytes: int
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """What takes space and is kept, and why."""

    what: str
    why: str
    training: str | None
    objects: int
    bytes: int
    written_unix: float


@dataclass(frozen=True)
class Collection:
    """What `collect` found.

    Attributes:
        done: whether it was freed; else it would be.
        in_use: chains that a process holds, so that nothing was touched in them.
    """

    storage: str
    done: bool
    freed: tuple[Freed, ...]
    kept: tuple[Kept, ...]
    in_use: tuple[InUse, ...]

    @property
    def objects(self) -> int:
        return sum(one.objects for one in self.freed)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.freed)

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        return {"objects": self.objects, "bytes": self.bytes, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """For people: what is freed by kind, what is in use, what is kept, and the sum."""
        for freed in self.freed:
            yield f"{freed.kind:11} {_amount(freed)}, training {freed.training[:12]}: {freed.why}"
        for used in self.in_use:
            yield f"{'in use':11} {used.folder}: held by {used.who}; it was left alone"
        for kept in self.kept:
            of = "" if kept.training is None else f" of training {kept.training[:12]}"
            yield f"{'kept':11} {kept.what}{of}: {_amount(kept)}, last written {date_text(kept.written_unix)}; {kept.why}"
        done = "freed" if self.done else "nothing was freed; with --yes it would be"
        yield f"{self.objects} objects of {size_text(self.bytes)}: {done}" if self.freed else "there is nothing to free"


def collect(
    experiment: Experiment,
    *,
    free: bool = False,
    older_than: float = HOURS * 3600,
    trajectories: bool = False,
    tell: Tell = lambda line: None,
) -> Collection:
    """Finds what nobody needs any more of all trainings of the experiment, and frees it with `free`.

    Safe to be killed in and to repeat.

    Args:
        older_than: seconds for which what nothing names is left alone.
        trajectories: also the states of trajectories all of whose asked queries are walked.

    Raises: InputError for a wrong storage; StorageError; LeaseLostError when somebody takes a chain over meanwhile.
    """
    inventory = inventory_of(experiment)
    collector = _Collector(inventory, free, time.time() - older_than, trajectories, tell)
    for training in inventory.trainings:
        collector.training(training)
    return collector.result()


@dataclass
class _Collector:
    inventory: Inventory
    free: bool
    before: float
    trajectories: bool
    tell: Tell
    judge: Judge = field(default_factory=Judge)
    found: dict[tuple[str, Reason], list[Garbage]] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    in_use: list[InUse] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = self.inventory.store

    def result(self) -> Collection:
        freed = [
            Freed(*reason, training, len(items), sum(item.size for item in items), tuple(item.path for item in items))
            for (training, reason), items in self.found.items()
        ]
        foreign = self.inventory.foreign
        if foreign:
            self._keep(f"{self.inventory.folder}/: names of others", "nothing of ours writes such names", None, foreign)
        return Collection(self.store.url, self.free, tuple(freed), tuple(self.kept), tuple(self.in_use))

    def training(self, training: Training) -> None:
        """Everything of one training. Older ones are kept, and cleaned all the same."""
        self._unfinished(training)
        expect = of_training(training.fingerprint)
        self.tell(f"{training.layout.trajectory}")
        complete = training.trajectory.completed(expect)
        ends = {} if complete is None else {walk: self._end(training, walk, complete) for walk in training.walks}
        free_states = complete is not None and self.trajectories and self._may_free_states(training, ends)

        def of_trajectory() -> Unneeded:
            if complete is None:
                return self.judge.of_unfinished_training(training.trajectory, expect)
            return self.judge.of_finished_training(training.trajectory, complete, free_states=free_states)

        self._clean(training, training.trajectory, of_trajectory, finished=complete is not None)
        for walk in training.walks:
            self._walk(training, walk, complete, ends.get(walk))
        for chain in training.banks:
            self.tell(chain.folder)
            self._clean(training, chain, dict, finished=False)  # who retrains clears what is finished himself
        self._scores(training, {walk: end for walk, end in ends.items() if end is not None})
        self._ledger(training)
        self._heartbeats(training)
        self._explain_kept(training)

    def _end(self, training: Training, walk: Walk, trajectory: Checkpoint) -> Checkpoint | None:
        expect = of_walk(training.fingerprint, walk.digest, trajectory.facts["trajectory"])
        return walk.chain.completed(expect)

    def _walk(self, training: Training, walk: Walk, trajectory: Checkpoint | None, end: Checkpoint | None) -> None:
        self.tell(walk.chain.folder)

        def unneeded() -> Unneeded:
            if trajectory is None:
                return {}  # nobody knows which trajectory it will be
            expect = of_walk(training.fingerprint, walk.digest, trajectory.facts["trajectory"])
            return self.judge.of_walk(walk.chain, expect, end)

        self._clean(training, walk.chain, unneeded, finished=end is not None)

    def _clean(self, training: Training, chain: Chain, unneeded: Callable[[], Unneeded], *, finished: bool) -> None:
        """One chain under its lease. It is looked at again once the lease is held, for only then does it stand still."""
        at_work = holder(chain)
        if at_work is not None and (not self.free or is_gone(at_work) is False):
            self.in_use.append(InUse.by(at_work, chain))
            return

        def garbage(lease: Lease | None = None) -> list[Garbage]:
            listed = list(self.store.tree(chain.folder))
            plans = _unreadable_plans(chain, listed, finished)
            return plans + chain_garbage(chain, listed, unneeded(), before=self.before, finished=finished, lease=lease)

        found = garbage()
        if found and self.free:
            try:
                with chain.take() as lease:
                    found = garbage(lease)
                    remove(lease, found)
            except HeldError as error:
                self.in_use.append(InUse(chain.folder, error.holder, str(error)))
                return
        self._note(training, found)

    def _may_free_states(self, training: Training, ends: Mapping[Walk, Checkpoint | None]) -> bool:
        """Whether all that was asked is walked, and nobody walks. A walk that begins meanwhile computes what it misses."""
        asked = training.asked()
        finished = {(walk.key, walk.digest) for walk, end in ends.items() if end is not None}
        open_queries = [id_ for id_, key, digest in asked or () if (key, digest) not in finished]
        if not asked or open_queries:
            why = f"{len(open_queries)} of {len(asked)} queries are not walked" if asked else "nobody knows its queries"
            states = [o for o in training.objects if o.path.startswith(f"{training.layout.trajectory}/")]
            self._keep("the trajectory's states", why, training, states)
            return False
        return all(holder(walk.chain) is None for walk in training.walks)

    def _scores(self, training: Training, finished: Mapping[Walk, Checkpoint]) -> None:
        """No lease: see stale_scores."""
        sheets = {(w.key, w.digest): sheet_name(w.key, end.facts["walk"]) for w, end in finished.items()}
        matrix = self._matrix_name(training, finished)

        def newer_sheet(name: str, sealed: SealedFile) -> str | None:
            current = sheets.get((str(sealed.facts.get("query_key")), str(sealed.facts.get("query_digest"))))
            return None if current == name else current

        def newer_matrix(name: str, sealed: SealedFile) -> str | None:
            return None if matrix == name else matrix

        newer = {training.layout.scores: newer_sheet, training.layout.matrix: newer_matrix}
        for folder in training.file_folders:
            self.tell(folder)
            listed = list(self.store.tree(folder))
            replaced_by = newer.get(folder, lambda name, sealed: None)
            self._free(training, stale_scores(self.store, folder, listed, replaced_by=replaced_by, before=self.before))

    def _matrix_name(self, training: Training, finished: Mapping[Walk, Checkpoint]) -> str | None:
        ends = {(walk.key, walk.digest): end for walk, end in finished.items()}
        statuses = [
            QueryStatus(id_, key, digest, True, 0, 0, 0, ends[key, digest].facts["walk"], None)
            for id_, key, digest in training.asked() or ()
            if (key, digest) in ends
        ]
        return expected_matrix_digest(statuses)[:16] if statuses else None

    def _ledger(self, training: Training) -> None:
        """Entries that cannot be read. No lease: a whole one is never among them, and nobody reads them but to count."""
        entries = [found for found in training.with_role("ledger") if _is_damaged(self._read(found))]
        self._free(training, [Garbage(found.path, found.size, UNREADABLE) for found in entries])

    def _heartbeats(self, training: Training) -> None:
        """Those of dead processes. No lease: the heartbeat of one that lives after all is there again with its next beat."""
        dead = []
        for found in training.with_role("heartbeat"):
            content = self._read(found)
            try:
                gone = None if isinstance(content, Exception) else is_gone(Holder.from_json(content["holder"]))
            except (KeyError, TypeError):
                gone = None
            if gone or (gone is None and found.modified < self.before and not isinstance(content, MissingObjectError)):
                dead.append(Garbage(found.path, found.size, HEARTBEAT))
        self._free(training, dead)

    def _unfinished(self, training: Training) -> None:
        """Publications that were last written to long ago, but for those of living holders.

        No lease: nobody has ever seen them, and a writer that is still at one fails and publishes nothing.
        """
        youngest: dict[str, StoredObject] = {}
        for found in self.store.sink.unfinished_tree(training.layout.root):
            known = youngest.get(found.path)
            if known is None or known.modified < found.modified:
                youngest[found.path] = found
        chains = {chain.folder: chain for chain in training.chains}
        old = []
        for path, found in sorted(youngest.items()):
            chain = chains.get(training.chain_folder(path) or "")
            if found.modified < self.before and not (chain is not None and _is_of_holder(chain, path)):
                old.append(found)
        if self.free:
            for found in old:
                folder, _, name = found.path.rpartition("/")
                self.store.sink.discard_unfinished(folder, name)
        self._note(training, [Garbage(found.path, found.size, UNFINISHED) for found in old])

    def _explain_kept(self, training: Training) -> None:
        if not training.current:
            why = (
                "made with other settings than the file's now; to remove it: "
                f"magic-pipeline delete ... --fingerprint {training.fingerprint[:12]}"
            )
            self._keep("another training", why, training, training.objects)
        asked = training.asked()
        wanted = {(key, digest) for _, key, digest in asked or ()}
        for walk in training.walks if asked is not None else ():
            if (walk.key, walk.digest) not in wanted:
                objects = [found for found in training.objects if found.path.startswith(f"{walk.chain.folder}/")]
                self._keep(
                    f"the walk of {walk.key} ({walk.digest[:8]})", "its query was asked before", training, objects
                )
        if training.foreign:
            self._keep("names of others", "nothing of ours writes such names", training, training.foreign)

    def _read(self, found: StoredObject) -> dict[str, Any] | DamagedObjectError | MissingObjectError:
        try:
            return self.store.read_json(found.path)
        except (DamagedObjectError, MissingObjectError) as error:
            return error

    def _free(self, training: Training, garbage: Sequence[Garbage]) -> None:
        if self.free:
            for item in garbage:
                self.store.delete(item.path)
        self._note(training, garbage)

    def _note(self, training: Training, garbage: Sequence[Garbage]) -> None:
        for item in garbage:
            self.found.setdefault((training.fingerprint, item.reason), []).append(item)

    def _keep(self, what: str, why: str, training: Training | None, objects: Sequence[StoredObject]) -> None:
        gone = {item.path for items in self.found.values() for item in items}
        objects = [found for found in objects if found.path not in gone]
        written = max((found.modified for found in objects), default=0.0)
        fingerprint = None if training is None else training.fingerprint
        self.kept.append(Kept(what, why, fingerprint, len(objects), sum(found.size for found in objects), written))


def _amount(one: Freed | Kept) -> str:
    return f"{one.objects} objects of {size_text(one.bytes)}"


def _is_damaged(content: object) -> bool:
    return isinstance(content, DamagedObjectError)


def _is_of_holder(chain: Chain, path: str) -> bool:
    """Whether an object of the chain is of the epoch that somebody holds."""
    at_work = holder(chain)
    if at_work is None:
        return False
    epoch = epoch_in_name(path.rpartition("/")[2])
    return epoch is None or epoch >= chain.highest_epoch()


def _unreadable_plans(chain: Chain, listed: Sequence[StoredObject], finished: bool) -> list[Garbage]:
    """Plans that cannot be read, where none is needed any more or a later one is there."""
    plans = sorted((o for o in listed if o.path.startswith(f"{chain.folder}/plans/")), key=lambda found: found.path)
    garbage = []
    for number, found in enumerate(plans):
        try:
            chain.store.read_json(found.path)
        except DamagedObjectError:
            if finished or number + 1 < len(plans):
                garbage.append(Garbage(found.path, found.size, UNREADABLE))
        except MissingObjectError:
            continue
    return garbage
