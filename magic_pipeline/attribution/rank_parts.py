"""States and checkpoints by rank: rank r's blob holds its pieces and nothing else, whichever process wrote it.

With one rank the blob holds the whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from magic_pipeline.attribution.board import Board, decided
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.checkpoints.chain import UNUSABLE, Chain, Checkpoint, SealedName
from magic_pipeline.checkpoints.digests import fingerprint, tensors_digest
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.checkpoints.store import Blob
from magic_pipeline.metagradient.ranks import Ranks
from magic_pipeline.metagradient.state import Tensors, TrainState


def part_of(rank: int) -> str:
    """The name of a rank's blob in a manifest."""
    return f"rank{rank}"


def owned(ranks: Ranks, state: TrainState) -> TrainState:
    """The state with the parameters' pieces of this process in place of the whole parameters."""
    return state if ranks.count == 1 else replace(state, params=ranks.cut(state.params))


def by_rank(ranks: Ranks, flat: Tensors) -> dict[int, dict[str, Tensor]]:
    """Flat pieces ("params/2:weight", ...) by the rank that they belong to."""
    if ranks.count == 1:
        return {0: dict(flat)}
    parts: dict[int, dict[str, Tensor]] = {rank: {} for rank in ranks.hosted}
    for name, tensor in flat.items():
        parts[int(name.partition(":")[0].rpartition("/")[2])][name] = tensor
    return parts


def parts_of_state(ranks: Ranks, state: TrainState) -> dict[str, dict[str, Tensor]]:
    """A state as it is sealed: this process's blobs by part."""
    return {part_of(rank): flat for rank, flat in by_rank(ranks, owned(ranks, state).flat()).items()}


def state_of_parts(opened: OpenExperiment, checkpoint: Checkpoint) -> TrainState:
    """The inverse: this process's blobs, on the model's device, and everybody's pieces of the parameters put together."""
    ranks, device = opened.ranks, opened.recipe.model.device
    flat: dict[str, Tensor] = {}
    for rank in ranks.hosted:
        flat |= {name: tensor.to(device) for name, tensor in checkpoint.tensors(part_of(rank)).items()}
    state = TrainState.from_flat(checkpoint.step, flat)
    return replace(state, params=ranks.join(state.params, opened.initial_state.params))


def digest_together(opened: OpenExperiment, mine: Mapping[int, Tensors]) -> str:
    """One digest of every rank's tensors, whoever holds them; with one rank, that of its tensors."""
    digests = {str(rank): tensors_digest(tensors) for rank, tensors in mine.items()}
    if opened.ranks.count == 1:
        return digests["0"]
    every = {rank: digest for part in opened.board.collect(digests) for rank, digest in part.items()}
    return fingerprint({"ranks": [every[str(rank)] for rank in range(opened.ranks.count)]})


def state_digest(opened: OpenExperiment, state: TrainState) -> str:
    """The digest of a state's content."""
    return digest_together(opened, by_rank(opened.ranks, owned(opened.ranks, state).flat()))


def agreed(
    opened: OpenExperiment,
    chain: Chain,
    names: Sequence[SealedName],
    expect: Mapping[str, Any],
    read: Sequence[str] = (),
) -> Checkpoint | None:
    """The first of these checkpoints that every process finds whole; each verifies the blobs of its own ranks.

    What one process cannot use, none uses: all go to the next together, and the leading one says why.

    Args:
        names: what the leading process has listed; the others' are not looked at.
        read: parts to keep from the verifying read, besides those of other ranks.
    """
    board = opened.board
    own = {*map(part_of, opened.ranks.hosted), *read} - {
        part_of(r) for r in range(opened.ranks.count) if r not in opened.ranks.hosted
    }
    for name in (SealedName(*pair) for pair in decided(board, [list(name) for name in names])):
        checkpoint, reason = None, None
        try:
            checkpoint = chain.usable(name, expect, parts=None if opened.ranks.gang.processes == 1 else own, read=read)
        except UNUSABLE as error:
            reason = str(error)
        reasons = [told for told in board.collect(reason) if told is not None]
        if not reasons:
            return checkpoint
        if board.leads:
            chain.warn_unused(name, "; ".join(dict.fromkeys(reasons)))
    return None


def seal_together(
    board: Board,
    chain: Chain,
    lease: Lease | None,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    facts: Mapping[str, Any],
) -> int:
    """Commits one checkpoint of all processes: everybody's blobs, durable, then the leading process's manifest. Its size in bytes.

    Args:
        lease: the leading process's; None for the others.
        parts: this process's.

    Raises: as `Lease.seal`.
    """
    prefix = decided(board, None if lease is None else lease.begin(step))
    with nullcontext() if lease is None else lease.unless_lost():
        mine = {part: chain.store.write_blob(chain.blobs, tensors, prefix=prefix) for part, tensors in parts.items()}
    told = board.collect({part: blob.as_json() for part, blob in mine.items()})
    blobs = {part: Blob.from_json(blob) for one in told for part, blob in sorted(one.items())}
    if lease is not None:
        lease.commit(step, blobs, facts)
    return sum(blob.size for blob in blobs.values())
