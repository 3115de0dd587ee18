"""What a bank has to show, read from its sealed blocks: every byte verified, nothing computed but the base model's measurements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magic_pipeline.attribution.linear_datamodeling import RunResult
from magic_pipeline.attribution.retraining import MEASUREMENTS, MODELS, OpenBank
from magic_pipeline.attribution.trajectory import required_trajectory, state_at
from magic_pipeline.checkpoints.digests import fingerprint
from magic_pipeline.errors import MagicError
from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.state import TrainState


@dataclass(frozen=True)
class RetrainedRun:
    """One finished retraining; `digest` is the data version: it changes with the retrained model and nothing else."""

    label: str
    digest: str
    result: RunResult


def retrained_runs(of: OpenBank) -> tuple[RetrainedRun, ...]:
    """The finished retrainings with their measurements of today's queries, in the bank's order."""
    return tuple(run for block in of.blocks for run in _runs(of, block))


def base_measurements(of: OpenBank) -> dict[str, float]:
    """Query key -> phi of the model that was trained on everything.

    Raises:
        MagicError: training is not complete.
    """
    opened, trajectory = of.opened, required_trajectory(of.opened)
    with exact_numerics(trajectory.threads), torch.no_grad():
        final = state_at(opened, trajectory, trajectory.steps)
        return {query.key: float(opened.phi(query, final.params, final.buffers)) for query in opened.queries}


def kept_models(of: OpenBank) -> dict[str, dict[str, torch.Tensor]]:
    """Label -> parameters of every retrained model.

    Raises:
        MagicError: a retraining is not finished, or its models were not kept.
    """
    models: dict[str, dict[str, torch.Tensor]] = {}
    for block in of.blocks:
        complete = of.chain(block).completed(of.expect(block), read=[MODELS])
        if complete is None or MODELS not in complete.blobs:
            raise MagicError(f"the models of the retrainings {block[0]} to {block[-1]} are not there")
        state = TrainState.from_flat(of.opened.steps, complete.tensors(MODELS))
        for row, label in enumerate(block):
            models[label] = {name: tensor[row] for name, tensor in state.params.items()}
    return models


def _runs(of: OpenBank, block: tuple[str, ...]) -> list[RetrainedRun]:
    chain, expect = of.chain(block), of.expect(block)
    complete = chain.completed(expect, read=[MEASUREMENTS])
    if complete is None:
        return []
    measured = complete.tensors(MEASUREMENTS)
    later = of.later(block)
    for step in sorted({name.step for name in later.sealed()}):
        added = later.load(step, expect, read=[MEASUREMENTS])
        measured |= {} if added is None else added.tensors(MEASUREMENTS)
    runs = []
    for row, label in enumerate(block):
        diverged = complete.facts["diverged"].get(label)
        digest = of.bank.run(label).digest
        version = fingerprint({"bank": expect["bank"], "run": digest, "model": complete.facts["models"][row]})
        values = {q.key: float(measured[q.measured][row]) for q in of.opened.queries if q.measured in measured}
        result = RunResult(label, digest, values if diverged is None else {}, diverged)
        runs.append(RetrainedRun(label, version, result))
    return runs
