"""The pullback of one training step, for many queries at once.

`pull_back` takes the cotangent of state[t+1] to that of state[t] and adds d step / d w, contracted with it, to the scores:

1. the optimizer's update and the clipping are pulled back, giving the cotangent of the complete gradient;
2. then shard by shard, in reverse: the shard's graph is built once (it does not depend on the query), the cotangents of (g_s, buffers)
   are pulled through it in batched calls of `chunk` lanes, and it is freed. Peak memory is one shard's graph.

Source: MAGIC (arXiv 2504.16430), REPLAY (arXiv 2503.13751); the batching over queries is this project's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.optimizers import clip, clip_pull_back
from magic_pipeline.metagradient.ranks import Ranks
from magic_pipeline.metagradient.state import Cotangent, Tensors
from magic_pipeline.metagradient.step import Recipe, Shard, StepRecord, leaves, total_denominator, weighted_loss


class PulledGraph(Protocol):
    """One shard at one state, ready for cotangents of its outputs "grad/<parameter>" and "buffer/<name>"."""

    def pull(self, cotangents: Tensors, *, keep_graph: bool) -> list[Tensor | None]:
        """Cotangents `[lanes, ...]` of the outputs to those of parameters, buffers and weights in turn; None where all are 0."""
        ...


class Engine(Protocol):
    """How shards are pulled back: the results are the same to rounding, whichever engine gives them."""

    def shard_graph(
        self, model: FunctionalModel, record: StepRecord, shard: Shard, index: int, denominator: float
    ) -> PulledGraph:
        """Shard number `index` of a step, at the step's own state."""
        ...


class EagerEngine:
    """Double backward, operation by operation: for any model."""

    def shard_graph(
        self, model: FunctionalModel, record: StepRecord, shard: Shard, index: int, denominator: float
    ) -> PulledGraph:
        return shard_graph(model, record, shard, index, denominator)


EAGER = EagerEngine()


def pull_back(
    recipe: Recipe,
    record: StepRecord,
    shards: Sequence[Shard],
    cotangent: Cotangent,
    scores: Tensor,
    *,
    chunk: int,
    active: Sequence[bool] | None = None,
    engine: Engine = EAGER,
) -> Cotangent:
    """The cotangent of `record.state` from that of the state after it.

    Args:
        cotangent: of the state after the step, `[lanes, ...]`.
        scores: `[lanes, units]`, added to in place.
        chunk: lanes per batched call; divides the number of lanes. The last bits depend on it.
        active: `[lanes]`; lanes that do not take part hold zeros, and a chunk without an active lane is skipped.

    Raises:
        ValueError: `chunk` does not divide the number of lanes.
    """
    lanes = len(scores)
    if chunk < 1 or lanes % chunk:
        raise ValueError(f"a chunk of {chunk} lanes does not divide {lanes} lanes")
    chunks = [slice(at, at + chunk) for at in range(0, lanes, chunk) if active is None or any(active[at : at + chunk])]
    state, ranks = record.state, recipe.ranks
    with torch.no_grad():
        to_params, to_slots, cot_clipped = recipe.optimizer.pull_back(
            ranks.cut(state.params),
            state.slots,
            clip(record.grads, recipe.clip_norm, ranks),
            recipe.learning_rates[state.step],
            state.step,
            cotangent.params,
            cotangent.slots,
        )
        cot_grads = clip_pull_back(record.grads, recipe.clip_norm, cot_clipped, ranks)
    denominator, cot_buffers = total_denominator(shards, state.step, ranks), cotangent.buffers
    pulling = _Pulling(ranks, state.params, chunks, cot_grads, to_params, scores)
    for index in _in_reverse(shards, ranks):
        if index is None:
            pulling.attend()
            continue
        graph = engine.shard_graph(recipe.model, record, shards[index], index, denominator)
        cot_buffers = pulling.through(graph, shards[index], cot_buffers)
    return Cotangent(to_params, to_slots, cot_buffers)


def _in_reverse(shards: Sequence[Shard], ranks: Ranks) -> Iterator[int | None]:
    """The positions of this process's shards, last micro-batch first, and in a micro-batch rank after rank.

    All processes yield equally often, None where this one has no shard left: they exchange what they pulled after each. In this
    order the sums do not depend on the number of processes.
    """
    by_rank = [[index for index, shard in enumerate(shards) if shard.rank == rank] for rank in ranks.hosted]
    longest = max(map(len, by_rank))
    if ranks.gang.processes > 1:
        device = shards[0].units.device if shards else torch.device("cpu")
        longest = int(ranks.gang.gather(torch.tensor([longest], device=device)).max())
    for microbatch in reversed(range(longest)):
        for indices in by_rank:
            yield indices[microbatch] if microbatch < len(indices) else None


@dataclass(frozen=True)
class ShardGraph:
    """The double-backward graph of one shard: outputs (g_s, buffers_{s+1}) of inputs (params, buffers_s, w).

    Attributes:
        twins: of some parameters, other leaves on which the outputs depend too (padded_embeddings.py).
    """

    outputs: Tensors
    params: Tensors
    buffers: Tensors
    weights: Tensor
    twins: Tensors

    @property
    def inputs(self) -> list[Tensor]:
        """Parameters, buffers, weights and twins, in this order."""
        return [*self.params.values(), *self.buffers.values(), self.weights, *self.twins.values()]

    def merged(self, parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What was pulled back to `inputs`, the twins' parts added to their parameters'."""
        own, others = list(parts[: len(parts) - len(self.twins)]), parts[len(parts) - len(self.twins) :]
        for name, part in zip(self.twins, others, strict=True):
            at = list(self.params).index(name)
            mine = own[at]
            own[at] = part if mine is None else mine if part is None else mine + part
        return own

    def pull(self, cotangents: Tensors, *, keep_graph: bool) -> list[Tensor | None]:
        """The cotangents `[lanes, ...]` of the outputs, pulled back to parameters, buffers and weights in turn."""
        wanted = {name: cotangents[name] for name in self.outputs}
        return self.merged(pull_lanes(self.outputs, self.inputs, wanted, keep_graph=keep_graph))


def shard_graph(model: FunctionalModel, record: StepRecord, shard: Shard, index: int, denominator: float) -> ShardGraph:
    """Builds the graph of shard number `index` of a step, at the step's own state."""
    return graph_of(
        model,
        record.state.params,
        record.shard_buffers[index],
        record.shard_counters[index],
        shard.batch,
        shard,
        denominator,
    )


def graph_of(
    model: FunctionalModel,
    params: Tensors,
    buffers: Tensors,
    counters: Tensors,
    batch: Any,
    shard: Shard,
    denominator: float | Tensor,
) -> ShardGraph:
    """The same of single tensors, for who records it; `batch` stands for the shard's."""
    params, buffers = leaves(params), leaves(buffers)
    with torch.enable_grad():
        twins = model.twins(params)
        out = model.losses(params, buffers, counters, batch, shard.seed, twins)
        places = shard.score_places
        weights = torch.ones(places.shape, dtype=out.losses.dtype, device=out.losses.device, requires_grad=True)
        loss = weighted_loss(out.losses, weights, denominator)
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            loss, list(params.values()), create_graph=True, allow_unused=True
        )
    outputs = {f"grad/{name}": g for name, g in zip(params, grads, strict=True) if g is not None and g.requires_grad}
    outputs |= {f"buffer/{name}": b for name, b in out.buffers.items() if b.requires_grad}
    return ShardGraph(outputs, params, buffers, weights, twins)


@dataclass(frozen=True)
class _Pulling:
    """What the shards of a step add to, in place.

    Attributes:
        cot_grads: of the complete gradient, this process's pieces `[lanes, ...]`.
        to_params: likewise, of the parameters before the step.
        scores: `[lanes, units]`.
    """

    ranks: Ranks
    params: Tensors
    chunks: Sequence[slice]
    cot_grads: Tensors
    to_params: Tensors
    scores: Tensor

    def through(self, graph: PulledGraph, shard: Shard, cot_buffers: Tensors) -> Tensors:
        """Adds the shard's part; gives the cotangent of the buffers before the shard."""
        before = {name: torch.zeros_like(cot) for name, cot in cot_buffers.items()}
        for number, rows in enumerate(self.chunks):
            cotangents = {f"grad/{n}": c for n, c in self._whole(rows).items()}
            cotangents |= {f"buffer/{n}": c[rows] for n, c in cot_buffers.items()}
            parts = graph.pull(cotangents, keep_graph=number < len(self.chunks) - 1)
            self._add(parts[: len(self.params)], rows)
            for into, part in zip(before.values(), parts[len(self.params) : -1], strict=True):
                if part is not None:
                    into[rows].add_(part)
            if parts[-1] is not None:
                add_scores(self.scores[rows], shard.score_places, parts[-1])
        return before

    def attend(self) -> None:
        """Takes part in the exchange where this process has no shard and others do."""
        for rows in self.chunks:
            self._whole(rows)
            self._add([None] * len(self.params), rows)

    def _whole(self, rows: slice) -> Tensors:
        return self.ranks.join({name: cot[rows] for name, cot in self.cot_grads.items()}, self.params)

    def _add(self, parts: Sequence[Tensor | None], rows: slice) -> None:
        self.ranks.add(self.to_params, parts, self.params, rows)


def add_scores(scores: Tensor, places: Tensor, parts: Tensor) -> None:
    """Adds `parts` `[lanes, *places.shape]` to `scores` `[lanes, places]` in place; what has no place (-1) is left out."""
    flat, addends = places.flatten().to(scores.device), parts.flatten(1).to(scores.dtype)
    if places.dim() > 1:
        kept = flat >= 0
        flat, addends = flat[kept], addends[:, kept]
    scores.index_add_(1, flat, addends)


def pull_lanes(
    outputs: Tensors, inputs: Sequence[Tensor], cotangents: Tensors, *, keep_graph: bool
) -> list[Tensor | None]:
    """Pulls `cotangents` (`[lanes, *shape]`, named like `outputs`) back to `inputs` in one call; None where nothing depends on one.

    Raises:
        RuntimeError: an operation on the way cannot be batched, and there is more than one lane.
    """
    # A single lane takes the plain call: batching it would only cost time.
    batched = len(next(iter(cotangents.values()))) > 1
    results: Sequence[Tensor | None] = torch.autograd.grad(
        list(outputs.values()),
        inputs,
        [cotangents[name] if batched else cotangents[name][0] for name in outputs],
        is_grads_batched=batched,
        retain_graph=keep_graph,
        allow_unused=True,
    )
    return [r if r is None or batched else r.unsqueeze(0) for r in results]
