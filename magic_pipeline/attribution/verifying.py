"""Reads back and hashes everything that is sealed of an experiment, and says what each fault costs. Changes nothing.

No torch and no task: an experiment whose code or data is lost can be verified too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from magic_pipeline.attribution.expectations import of_training, of_walk
from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.inventory import InUse, Inventory, Tell, Training, inventory_of, take_inventory
from magic_pipeline.attribution.sealed_files import read_manifest
from magic_pipeline.checkpoints.audit import Finding as ChainFinding
from magic_pipeline.checkpoints.chain import (
    UNUSABLE,
    Chain,
    Checkpoint,
    ForeignError,
    SealedName,
    check_facts,
    epoch_in_name,
)
from magic_pipeline.checkpoints.garbage import holder
from magic_pipeline.checkpoints.holder import Holder, is_gone
from magic_pipeline.checkpoints.sinks import StoredObject
from magic_pipeline.checkpoints.store import Blob
from magic_pipeline.errors import DamagedObjectError, MissingObjectError, StorageError

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment

Kind = Literal["damaged", "orphaned", "foreign"]


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        object: a path in the store.
        kind: damaged (missing, altered or unreadable), orphaned (left by a writer that ended, and read by nobody), or foreign
            (whole, but of another schema, of other work, or under a name that nothing of ours writes).
        problem: the kind, and what was expected and found.
        consequence: what it costs.
    """

    object: str
    kind: Kind
    problem: str
    consequence: str


@dataclass(frozen=True)
class Verification:
    """What was read: `checked` objects of `bytes` bytes of these trainings (fingerprints), the current one first.

    Attributes:
        in_use: chains that a process holds: what it writes right now is not called orphaned.
    """

    findings: tuple[Finding, ...]
    checked: int
    bytes: int
    storage: str
    trainings: tuple[str, ...]
    in_use: tuple[InUse, ...]

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """For people."""
        for finding in self.findings:
            yield f"{finding.object}\n  {finding.problem}\n  {finding.consequence}"
        for used in self.in_use:
            yield f"{used.folder}\n  in use by {used.who}: what it is writing now is not judged"
        yield f"{self.checked} objects of {self.bytes} bytes checked, {len(self.findings)} findings"


_CONSEQUENCE: Mapping[Kind, str] = {
    "damaged": "it is not used; a run goes on from the one before and seals it again",
    "orphaned": "it takes space and nothing reads it; gc frees it",
    "foreign": "it is not used",
}
_DOCUMENT = "it is not used; what needs it is made again"
_SHEET = "it is not used; it is made again from the finished walk"
_STATE = "it is not used; it is computed again from the state before it"


def verify_stored(experiment: Experiment, *, tell: Tell = lambda line: None) -> Verification:
    """Every chain, plan, score file, ledger entry and description of all trainings of an experiment file.

    Args:
        tell: called with the name of each folder before it is read.

    Raises: InputError for a wrong storage; StorageError when it cannot be listed.
    """
    return _verify(inventory_of(experiment), tell)


def verify_experiment(opened: OpenExperiment, *, tell: Tell = lambda line: None) -> Verification:
    """As `verify_stored`; the current training is the one that was opened. Raises: StorageError."""
    folder = opened.experiment.storage_folder
    return _verify(take_inventory(opened.store, folder, lambda name, _: name == opened.fingerprint), tell)


def _verify(inventory: Inventory, tell: Tell) -> Verification:
    readers = [_Reader(training, tell) for training in inventory.trainings]
    findings = [finding for reader in readers for finding in reader.findings()]
    findings += [_stranger(found) for found in inventory.foreign]
    return Verification(
        tuple(findings),
        sum(reader.checked for reader in readers),
        sum(reader.bytes for reader in readers),
        inventory.store.url,
        tuple(reader.training.fingerprint for reader in readers),
        tuple(used for reader in readers for used in reader.in_use),
    )


class _Reader:
    """One training."""

    def __init__(self, training: Training, tell: Tell) -> None:
        self.training, self.store, self.layout, self.tell = training, training.store, training.layout, tell
        self.checked = self.bytes = 0
        self.in_use: list[InUse] = []

    def findings(self) -> Iterator[Finding]:
        yield from self._documents()
        yield from self._trajectory()
        yield from self._walks()
        yield from self._banks()
        for folder in self.training.file_folders:
            self.tell(folder)
            yield from self._files(folder)
        yield from self._heartbeats()
        yield from self._unfinished()
        yield from map(_stranger, self.training.foreign)

    def _documents(self) -> Iterator[Finding]:
        """experiment.json, queries.json, walk plans and the ledger."""
        self.tell(self.layout.root)
        for found in self.training.with_role("description", "queries", "plan", "ledger"):
            self.checked += 1
            try:
                self.store.read_json(found.path)
            except DamagedObjectError as error:
                yield Finding(found.path, "damaged", f"damaged: {error}", _DOCUMENT)
            except MissingObjectError:
                self.checked -= 1  # it was removed since it was listed

    def _trajectory(self) -> Iterator[Finding]:
        chain, expect = self.training.trajectory, of_training(self.training.fingerprint)
        self.complete = chain.completed(expect)
        states = {} if self.complete is None else _states(self.complete)

        def expected(name: SealedName) -> dict[str, Any]:
            return expect | ({"state": states[name.step]} if name.step in states else {})

        yield from self._chain(
            chain, {name: expected(name) for name in [*chain.sealed(), *chain.completions()]}, _STATE
        )

    def _walks(self) -> Iterator[Finding]:
        """Of every query that the store holds, also of queries that are no longer asked."""
        for walk in self.training.walks:
            expect = of_walk(self.training.fingerprint, walk.digest, "")
            if self.complete is None:
                del expect["trajectory"]  # nobody knows which one it will be
            else:
                expect["trajectory"] = self.complete.facts["trajectory"]
            names = [*walk.chain.sealed(), *walk.chain.completions()]
            yield from self._chain(walk.chain, dict.fromkeys(names, expect), _CONSEQUENCE["damaged"])

    def _banks(self) -> Iterator[Finding]:
        for chain in self.training.banks:
            names = [*chain.sealed(), *chain.completions()]
            expect = of_training(self.training.fingerprint)
            yield from self._chain(chain, dict.fromkeys(names, expect), _CONSEQUENCE["damaged"])

    def _chain(self, chain: Chain, expected: Mapping[SealedName, Mapping[str, Any]], cost: str) -> Iterator[Finding]:
        self.tell(chain.folder)
        foreign = []
        for name, expect in expected.items():
            self.checked += 1
            try:
                checkpoint = chain.manifest(name)
            except UNUSABLE:
                continue  # the audit tells
            self.bytes += sum(blob.size for blob in checkpoint.blobs.values())
            try:
                check_facts(checkpoint.facts, expect)
            except ForeignError as error:
                foreign.append(Finding(chain.path(name), "foreign", f"foreign: {error}", _CONSEQUENCE["foreign"]))
        audited = chain.audit()
        at_work = holder(chain)
        if at_work is not None:
            self.in_use.append(InUse.by(at_work, chain))
        yield from foreign
        for found in self._still_true(chain, audited, at_work):
            kind: Kind = "foreign" if found.kind == "foreign-schema" else found.kind
            consequence = cost if kind == "damaged" else _CONSEQUENCE[kind]
            yield Finding(found.object, kind, f"{kind}: {found.detail}", consequence)

    def _still_true(
        self, chain: Chain, audited: Sequence[ChainFinding], at_work: Holder | None
    ) -> Iterator[ChainFinding]:
        """Without what a live writer is at, what it has removed since it was listed, and names that are not a chain's."""
        foreign = {found.path for found in self.training.foreign}
        named = set(_blobs_named(chain)) if audited else set()
        for found in audited:
            folder, _, name = found.object.rpartition("/")
            if found.object in foreign or found.detail.startswith("its publication"):
                continue  # told once, for all folders
            if found.kind == "orphaned" and (_is_at_work(chain, at_work, name) or not self.store.exists(found.object)):
                continue
            removed = name not in named if folder == chain.blobs else not self.store.exists(found.object)
            if found.kind == "damaged" and removed:
                continue
            yield found

    def _files(self, folder: str) -> Iterator[Finding]:
        """Score sheets, the matrix, or reports."""
        listed = [found.path for found in self.training.objects if found.path.rpartition("/")[0] == f"{folder}/blobs"]
        named = set()
        for manifest in self.store.list(f"{folder}/manifests"):
            path = f"{folder}/manifests/{manifest}"
            if any(found.path == path for found in self.training.foreign):
                continue
            self.checked += 1
            try:
                named.add(f"{folder}/blobs/{Blob.from_json(self.store.read_json(path)['blob']).name}")
                self.bytes += read_manifest(self.store, folder, manifest).blob.size
            except (DamagedObjectError, MissingObjectError, KeyError, TypeError, ValueError) as error:
                if self.store.exists(path):
                    told = str(error) if isinstance(error, StorageError) else f"it is no manifest of ours: {error!r}"
                    yield Finding(path, "damaged", f"damaged: {told}", _SHEET)
        # Listed before the manifests: what was written since then may be sealed by now.
        for path in listed:
            if path not in named and self.store.exists(path):
                problem = "orphaned: no manifest names it; its writer may be about to seal it"
                yield Finding(path, "orphaned", problem, _CONSEQUENCE["orphaned"])

    def _heartbeats(self) -> Iterator[Finding]:
        for found in self.training.with_role("heartbeat"):
            try:
                process = Holder.from_json(self.store.read_json(found.path)["holder"])
            except MissingObjectError:
                continue
            except (DamagedObjectError, KeyError, TypeError) as error:
                yield Finding(found.path, "damaged", f"damaged: {error}", "its process counts as silent")
            else:
                if is_gone(process):
                    yield Finding(found.path, "orphaned", f"orphaned: {process} has ended", _CONSEQUENCE["orphaned"])

    def _unfinished(self) -> Iterator[Finding]:
        chains = {chain.folder: chain for chain in self.training.chains}
        for path in sorted({found.path for found in self.store.sink.unfinished_tree(self.layout.root)}):
            chain = chains.get(self.training.chain_folder(path) or "")
            if chain is not None and _is_at_work(chain, holder(chain), path.rpartition("/")[2]):
                continue
            problem = "orphaned: its publication was begun and not finished"
            yield Finding(path, "orphaned", problem, _CONSEQUENCE["orphaned"])


def _states(complete: Checkpoint) -> dict[int, str]:
    return dict(zip(complete.facts["boundaries"], complete.facts["state_digests"], strict=True))


def _blobs_named(chain: Chain) -> Iterable[str]:
    """By the manifests that are there now."""
    for name in [*chain.sealed(), *chain.completions()]:
        try:
            yield from (blob.name for blob in chain.manifest(name).blobs.values())
        except (StorageError, ForeignError):
            continue


def _is_at_work(chain: Chain, at_work: Holder | None, name: str) -> bool:
    """Whether an object of this name may be the live holder's, and about to be sealed."""
    epoch = epoch_in_name(name)
    return at_work is not None and (epoch is None or epoch >= chain.highest_epoch())


def _stranger(found: StoredObject) -> Finding:
    problem = "foreign: nothing of magic_pipeline writes an object of this name here"
    return Finding(found.path, "foreign", problem, "it is not used, and gc and delete leave it alone")
