"""One step and its pullback, from states in the middle of training, equal autograd of the reference's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from magic_pipeline.metagradient.pullback import pull_back
from magic_pipeline.metagradient.state import Cotangent, TrainState
from magic_pipeline.metagradient.step import train_step
from tests.metagradient import cases, running
from tests.reference import unrolled
from tests.reference.problem import Problem
from tests.reference.replica import Replica

LANES = 2


def random_like(value: Tensor, seed: int, *lead: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((*lead, *value.shape), generator=generator, dtype=value.dtype)


def reference_pull_back(problem: Problem, state: TrainState, cotangent: dict[str, Tensor]) -> tuple[Any, Tensor]:
    """Autograd of the reference's step, for one lane: the cotangent by flat name and that of the weights."""
    leaves = {n: v.clone().requires_grad_() for n, v in state.flat().items() if not n.startswith("counters/")}
    weights = problem.weights.requires_grad_()
    named = {kind: _under(leaves, kind) for kind in ("params", "buffers")}
    slots = {
        name: {slot: leaves[f"slots/{slot}/{name}"] for slot in state.slots} or {"momentum_buffer": torch.zeros(())}
        for name in named["params"]
    }
    replica = Replica(problem.build())
    buffers = {**replica.buffers, **state.counters, **named["buffers"]}
    start = unrolled.State(named["params"], slots, buffers)
    after, _, _ = unrolled.one_step(problem, replica, start, state.step, weights)
    outputs = {f"params/{n}": v for n, v in after.params.items()}
    outputs |= {f"slots/{slot}/{n}": after.slots[n][slot] for slot in state.slots for n in after.params}
    outputs |= {f"buffers/{n}": after.buffers[n] for n in state.buffers}
    grads = torch.autograd.grad(
        list(outputs.values()), [*leaves.values(), weights], [cotangent[n] for n in outputs], materialize_grads=True
    )
    return dict(zip(leaves, grads, strict=False)), grads[-1]


def _under(flat: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{kind}/"): v for n, v in flat.items() if n.startswith(f"{kind}/")}


@pytest.mark.parametrize("micro", cases.MICRO_BATCHES)
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-nesterov-decay", "adamw"])
@pytest.mark.parametrize("family", ["mlp", "mlp-dropout", "conv-batchnorm", "gpt2-tied"])
def test_the_pullback_of_one_step_equals_autograd(family: str, optimizer: str, micro: int) -> None:
    problem = cases.FAMILIES[family].problem(cases.OPTIMIZERS[optimizer], clip_norm=0.5, micro=micro)
    run = running.recipe(problem)
    state = running.train(problem, run)[2]
    after, record = train_step(run, state, running.data(problem)(2))
    kinds = Cotangent.zeros(after, LANES)
    for lane in range(LANES):
        random = {n: random_like(v, seed) for seed, (n, v) in enumerate(kinds.lane(lane).items(), start=100 * lane)}
        kinds = kinds.with_lane(lane, random)
    scores = torch.zeros(LANES, problem.units, dtype=torch.float64)
    pulled = pull_back(run, record, running.data(problem)(2), kinds, scores, chunk=LANES)
    for lane in range(LANES):
        expected, by_weights = reference_pull_back(problem, state, kinds.lane(lane))
        found = pulled.lane(lane)
        scale = max(float(value.abs().max()) for value in expected.values())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10 * scale, msg=name)
        torch.testing.assert_close(scores[lane], by_weights, rtol=1e-9, atol=1e-10 * float(by_weights.abs().max()))
