"""The pullback of one training step, for many queries at once.

`pull_back` takes the cotangent of state[t+1] to that of state[t] and adds d step / d w, contracted with it, to the scores:

1. the optimizer's update and the clipping are pulled back, giving the cotangent of the complete gradient;
2. then shard by shard, in reverse: the shard's graph is built once (it does not depend on the query), the cotangents of (g_s, buffers)
   are pulled through it in batched calls of `chunk` lanes, and it is freed. Peak memory is one shard's graph.

Source: MAGIC (arXiv 2504.16430), REPLAY (arXiv 2503.13751); the batching over queries is this project's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.optimizers import clip, clip_pull_back
from magic_pipeline.metagradient.state import Cotangent, Tensors
from magic_pipeline.metagradient.step import Recipe, Shard, StepRecord, leaves, total_denominator, weighted_loss


def pull_back(
    recipe: Recipe,
    record: StepRecord,
    shards: Sequence[Shard],
    cotangent: Cotangent,
    scores: Tensor,
    *,
    chunk: int,
    active: Sequence[bool] | None = None,
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
    state = record.state
    with torch.no_grad():
        to_params, to_slots, cot_clipped = recipe.optimizer.pull_back(
            state.params,
            state.slots,
            clip(record.grads, recipe.clip_norm),
            recipe.learning_rates[state.step],
            state.step,
            cotangent.params,
            cotangent.slots,
        )
        cot_grads = clip_pull_back(record.grads, recipe.clip_norm, cot_clipped)
    denominator, cot_buffers = total_denominator(shards, state.step), cotangent.buffers
    for index in reversed(range(len(shards))):
        graph = shard_graph(recipe.model, record, shards[index], index, denominator)
        cot_buffers = _pull_through(graph, shards[index], chunks, chunk, cot_grads, cot_buffers, to_params, scores)
    return Cotangent(to_params, to_slots, cot_buffers)


@dataclass(frozen=True)
class ShardGraph:
    """The double-backward graph of one shard: outputs (g_s, buffers_{s+1}) of inputs (params, buffers_s, w)."""

    outputs: Tensors
    params: Tensors
    buffers: Tensors
    weights: Tensor


def shard_graph(model: FunctionalModel, record: StepRecord, shard: Shard, index: int, denominator: float) -> ShardGraph:
    """Builds the graph of shard number `index` of a step, at the step's own state."""
    params, buffers = leaves(record.state.params), leaves(record.shard_buffers[index])
    with torch.enable_grad():
        out = model.losses(params, buffers, record.shard_counters[index], shard.batch, shard.seed)
        weights = torch.ones_like(out.losses, requires_grad=True)
        loss = weighted_loss(out.losses, weights, denominator)
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            loss, list(params.values()), create_graph=True, allow_unused=True
        )
    outputs = {f"grad/{name}": g for name, g in zip(params, grads, strict=True) if g is not None and g.requires_grad}
    outputs |= {f"buffer/{name}": b for name, b in out.buffers.items() if b.requires_grad}
    return ShardGraph(outputs, params, buffers, weights)


def _pull_through(
    graph: ShardGraph,
    shard: Shard,
    chunks: Sequence[slice],
    chunk: int,
    cot_grads: Tensors,
    cot_buffers: Tensors,
    to_params: Tensors,
    scores: Tensor,
) -> Tensors:
    """Adds the shard's part to `to_params` and `scores` in place; gives the cotangent of the buffers before the shard."""
    before = {name: torch.zeros_like(cot) for name, cot in cot_buffers.items()}
    cotangents = {f"grad/{n}": c for n, c in cot_grads.items()} | {f"buffer/{n}": c for n, c in cot_buffers.items()}
    inputs = [*graph.params.values(), *graph.buffers.values(), graph.weights]
    for number, rows in enumerate(chunks):
        lanes = {name: cotangents[name][rows] for name in graph.outputs}
        parts = pull_lanes(graph.outputs, inputs, lanes, keep_graph=number < len(chunks) - 1)
        for into, part in zip([*to_params.values(), *before.values()], parts[:-1], strict=True):
            if part is not None:
                into[rows].add_(part)
        if parts[-1] is not None:
            scores[rows].index_add_(1, shard.units.to(scores.device), parts[-1].to(scores.dtype))
    return before


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
