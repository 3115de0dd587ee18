"""Reading a whole chain back and saying what is wrong with it. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from magic_pipeline.checkpoints.chain import (
    COMPLETE_STEP,
    Chain,
    Checkpoint,
    ForeignError,
    SealedName,
    epoch_in_name,
)
from magic_pipeline.checkpoints.holder import Holder
from magic_pipeline.errors import DamagedObjectError, MissingObjectError

Kind = Literal["damaged", "orphaned", "foreign-schema"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        object: its path, relative to the store.
        kind: damaged (missing, altered or unreadable), orphaned (nothing names it), or foreign-schema (this program
            cannot read it).
        detail: what was expected and what was found.
    """

    object: str
    kind: Kind
    detail: str


def audit(chain: Chain) -> list[Finding]:
    """Every epoch, manifest and blob of the chain read and hashed again; sorted by object.

    A writer at work may show as one orphan (a blob whose manifest is about to be sealed): its detail says so.

    Raises: StorageError when the storage cannot be read or listed: that says nothing about what is in it.
    """
    named: set[str] = set()
    opaque: set[int] = set()
    findings = list(_epochs(chain))
    found: dict[SealedName, list[Finding]] = {}
    for name in [*chain.sealed(), *chain.completions()]:
        path = chain.path(name)
        try:
            checkpoint = chain.manifest(name)
        except ForeignError as error:
            opaque.add(name.epoch)
            found[name] = [Finding(path, "foreign-schema", str(error))]
        except (MissingObjectError, DamagedObjectError) as error:
            found[name] = [Finding(path, "damaged", str(error))]
        else:
            named.update(blob.name for blob in checkpoint.blobs.values())
            found[name] = list(_blobs(chain, checkpoint))
    findings += _without_superseded(chain, found)
    findings += _orphans(chain, named, opaque)
    findings += _strangers(chain)
    return sorted(findings, key=lambda finding: (finding.object, finding.kind))


def _without_superseded(chain: Chain, found: Mapping[SealedName, Sequence[Finding]]) -> Iterator[Finding]:
    """The findings, where damage of an epoch that nobody reads any more is a matter of space alone.

    A holder that was overtaken just before it sealed lands a manifest whose blobs may be gone: whoever finished removed them.
    """
    finished = max((name for name in found if name.step == COMPLETE_STEP and not found[name]), default=None)
    for name, findings in found.items():
        for finding in findings:
            if finished is None or name.epoch >= finished.epoch or finding.kind != "damaged":
                yield finding
            else:
                detail = f"superseded by {chain.path(finished)}: {finding.detail}"
                yield replace(finding, kind="orphaned", detail=detail)


def _epochs(chain: Chain) -> Iterator[Finding]:
    for epoch in chain.taken_epochs():
        path = chain.epoch_path(epoch)
        try:
            Holder.from_json(chain.store.read_json(path))
        except (MissingObjectError, DamagedObjectError, KeyError, TypeError) as error:
            yield Finding(path, "damaged", str(error))


def _blobs(chain: Chain, checkpoint: Checkpoint) -> Iterator[Finding]:
    for part, blob in checkpoint.blobs.items():
        try:
            chain.store.verify_blob(chain.blobs, blob)
        except (MissingObjectError, DamagedObjectError) as error:
            yield Finding(f"{chain.blobs}/{blob.name}", "damaged", f"{error} (part {part} of {checkpoint.path})")


def _orphans(chain: Chain, named: set[str], opaque: set[int]) -> Iterator[Finding]:
    taken = chain.taken_epochs()
    writing = taken[-1] if taken and not chain.store.exists(chain.released_path(taken[-1])) else None
    # Listed again after the blobs: a manifest sealed meanwhile names its blobs, and one retired meanwhile has none.
    for name in set(chain.store.list(chain.blobs)) - named - _named_now(chain):
        epoch = epoch_in_name(name)
        if epoch is None or epoch not in opaque:
            at_work = "; its writer may be about to seal it" if epoch is not None and epoch == writing else ""
            yield Finding(f"{chain.blobs}/{name}", "orphaned", f"no manifest names it{at_work}")
    for folder in (chain.blobs, chain.manifests, chain.epochs, chain.folder):
        for name in chain.store.sink.unfinished(folder):
            yield Finding(f"{folder}/{name}", "orphaned", "its publication was begun and not finished")


def _named_now(chain: Chain) -> set[str]:
    names: set[str] = set()
    for name in [*chain.sealed(), *chain.completions()]:
        try:
            names.update(blob.name for blob in chain.manifest(name).blobs.values())
        except (MissingObjectError, DamagedObjectError, ForeignError):
            continue
    return names


def _strangers(chain: Chain) -> Iterator[Finding]:
    for folder in (chain.manifests, chain.epochs):
        for name in chain.store.list(folder):
            if epoch_in_name(name) is None:
                yield Finding(f"{folder}/{name}", "orphaned", "its name is not one that a chain writes")
