"""How a bank is trained: how many retrainings at once, batched or one by one. Measured by a probe, sealed once, kept by every resume.

The blocks of a bank are its unit of work: a block is trained as a whole, whatever was killed in between, so that a resumed bank has
the same bits as one that nothing disturbed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from magic_pipeline.attribution.bank import Bank
from magic_pipeline.attribution.layout import BankLayout
from magic_pipeline.attribution.library_versions import versions
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.walk_planner import memory_budget
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import DamagedObjectError, InputError, MissingObjectError, ObjectExistsError
from magic_pipeline.metagradient.batched_training import (
    batched_gradient,
    batched_step,
    repeated,
    run_of,
    separate_step,
)
from magic_pipeline.metagradient.ranks import Ranks
from magic_pipeline.metagradient.step import train_step

logger = logging.getLogger("magic_pipeline.attribution")

# Wider blocks gain little, and a kill loses up to a block.
_WIDTHS = (8, 16, 32, 64, 128)
# A width this much slower per retraining than the best so far ends the search.
_HOPELESS = 1.1
# Parameters, gradient, two slots and their successors, and what the update makes in between.
_PARAMS_PER_RUN = 10
# A batched step may differ from the same step alone by rounding and no more, relative to each tensor's largest value.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_KEPT_BYTES = 2**30
# What torch.func.vmap raises for a model that it does not take.
NOT_BATCHABLE = (RuntimeError, ValueError, TypeError)


@dataclass(frozen=True)
class BankPlan:
    """What decides a bank's bits, and what is kept of it.

    Attributes:
        width: retrainings in a block.
        batched: whether a block is one batched training.
        keep_models: whether the retrained parameters are sealed.
        threads, microbatch_size: as in the trajectory.
        why: one line for people.
    """

    width: int
    batched: bool
    keep_models: bool
    threads: int
    microbatch_size: int | None
    device: str
    versions: Mapping[str, str]
    why: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"versions": dict(self.versions)}


def sealed_bank_plan(store: Store, layout: BankLayout) -> BankPlan | None:
    """The newest whole plan."""
    for name in reversed(store.list(layout.plans)):
        try:
            return BankPlan(**store.read_json(f"{layout.plans}/{name}")["plan"])
        except (DamagedObjectError, MissingObjectError, KeyError, TypeError) as error:
            logger.warning("%s/%s/%s: the bank's plan is not used: %s", store.url, layout.plans, name, error)
    return None


def seal_bank_plan(store: Store, layout: BankLayout, plan: BankPlan) -> BankPlan:
    """Seals the plan, unless another process was first: then that one's holds."""
    number = len(store.list(layout.plans))
    try:
        store.create_json(f"{layout.plans}/{number:08d}.json", {"plan": plan.as_dict()})
    except ObjectExistsError:
        return sealed_bank_plan(store, layout) or plan
    return plan


def plan_bank(opened: OpenExperiment, bank: Bank, *, threads: int, microbatch_size: int | None, keep: bool) -> BankPlan:
    """Chooses the width with the least time per retraining among those that fit the memory budget, and says so."""
    width, why = _choose_width(opened, bank, microbatch_size)
    logger.info("%d retrainings (%s): %s", len(bank.runs), bank.kind, why)
    return BankPlan(
        width=width,
        batched=width > 1,
        keep_models=keep,
        threads=threads,
        microbatch_size=microbatch_size,
        device=opened.recipe.model.device.type,
        versions=versions(),
        why=why,
    )


def keeps_models(opened: OpenExperiment, bank: Bank, setting: bool | str) -> bool:
    """`keep_models`: auto keeps them while the whole bank's take less than 1 GiB."""
    if isinstance(setting, bool):
        return setting
    state = opened.initial_state
    size = sum(tensor.nbytes for tensors in (state.params, state.buffers) for tensor in tensors.values())
    return size * len(bank.runs) <= _KEPT_BYTES


def weights_of(opened: OpenExperiment, bank: Bank, labels: tuple[str, ...]) -> Tensor:
    """`[runs, units]` on the model's device, in its dtype."""
    model = opened.recipe.model
    weights = torch.ones(len(labels), len(opened.units), dtype=model.dtype)
    for row, label in enumerate(labels):
        run = bank.run(label)
        weights[row, torch.from_numpy(run.rows)] = torch.from_numpy(run.values).to(model.dtype)
    return weights.to(model.device)


def _choose_width(opened: OpenExperiment, bank: Bank, microbatch_size: int | None) -> tuple[int, str]:
    fitting = [width for width in _widths(len(bank.runs)) if width * _bytes_per_run(opened) <= memory_budget(opened)]
    if len(bank.runs) < 2 or not fitting:
        return 1, "one by one: memory for no more" if len(bank.runs) > 1 else "one retraining"
    alone = _seconds(opened, bank, 1, microbatch_size)
    best, timed = 1, {1: alone}
    for width in fitting:
        try:
            if width == fitting[0]:
                _check_batched_step(opened, bank, microbatch_size)
            timed[width] = _seconds(opened, bank, width, microbatch_size)
        except InputError as error:
            logger.warning("retraining goes one by one: %s", error)
            return 1, f"one by one: {error}"
        except NOT_BATCHABLE as error:
            why = str(error).strip().partition("\n")[0]
            logger.warning("retraining goes one by one, since the model cannot be batched over its parameters: %s", why)
            return 1, f"one by one: the model cannot be batched ({why})"
        if timed[width] < timed[best]:
            best = width
        elif timed[width] > _HOPELESS * timed[best]:
            break
    if best == 1:
        gain = alone / min(timed[width] for width in timed if width > 1)
        return 1, f"one by one, which is the fastest here (batching: {gain:.2f} times the speed)"
    return best, f"{best} at a time, {alone / timed[best]:.1f} times as fast as one by one"


def _widths(runs: int) -> list[int]:
    return sorted({min(width, runs) for width in _WIDTHS})


def _seconds(opened: OpenExperiment, bank: Bank, width: int, microbatch_size: int | None) -> float:
    """Seconds per retraining and step; the better of two steps after a first one that warms up."""
    state = repeated(opened.recipe, opened.initial_state, width)
    weights = weights_of(opened, bank, bank.labels[:width])
    step = batched_step if width > 1 else separate_step
    seconds = []
    for number in range(min(3, opened.steps)):
        shards = opened.shards(number, microbatch_size)
        began = _clock(opened.recipe.model.device)
        state, _ = step(opened.recipe, state, shards, weights)
        seconds.append(_clock(opened.recipe.model.device) - began)
    return max(min(seconds), 1e-9) / width


def _check_batched_step(opened: OpenExperiment, bank: Bank, microbatch_size: int | None) -> None:
    """Raises InputError where two retrainings at once do not give what each gives alone: a model that looks across its batch."""
    labels = bank.labels[:2]
    weights, shards = weights_of(opened, bank, labels), opened.shards(0, microbatch_size)
    start = repeated(opened.recipe, opened.initial_state, 2)
    grads, after = batched_gradient(opened.recipe, start, shards, weights)
    whole, one_rank = [replace(shard, rank=0) for shard in shards], replace(opened.recipe, ranks=Ranks())
    tolerance = _TOLERANCE[opened.recipe.model.dtype]
    for run in range(2):
        _, record = train_step(one_rank, run_of(start, run), whole, weights[run])
        off = abs(float(after.losses[run]) - record.loss) / max(abs(record.loss), 1e-30)
        # Relative to the largest of all: a parameter whose gradient is 0 has nothing but rounding in it.
        scale = max((float(g.abs().max()) for g in record.grads.values() if g.numel()), default=0.0)
        for name, alone in record.grads.items():
            if alone.numel() and scale > 0:
                off = max(off, float((grads[name][run] - alone).abs().max()) / scale)
        if not off <= tolerance:
            raise InputError(f"batched over parameters, the model computes something else (by {off:.2g}, relative)")


def _bytes_per_run(opened: OpenExperiment) -> int:
    """Of one more retraining in a batched step: its state many times over, and the graph of the largest micro-batch."""
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    shards = opened.data(0)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        one = repeated(opened.recipe, opened.initial_state, 1)
        ones = torch.ones(1, len(opened.units), dtype=opened.recipe.model.dtype, device=opened.recipe.model.device)
        separate_step(opened.recipe, one, shards[:1], ones)
    params = sum(tensor.nbytes for tensor in opened.initial_state.params.values())
    return _PARAMS_PER_RUN * params + 2 * sum(saved.values())


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
