"""A padding row is kept out of a step's gradient and nowhere else: the step keeps its bits, the pullback is its true transpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.optimizers import SGD
from magic_pipeline.metagradient.pullback import pull_lanes, shard_graph
from magic_pipeline.metagradient.step import Recipe, Shard, StepRecord, train_step

ROWS, WIDTH, PADDING = 5, 3, 0
TOKENS = torch.tensor([[0, 1, 2], [2, 0, 3], [4, 4, 0]])


class Words(nn.Module):
    """A bag of words into words; the head is the embedding itself, or one of its own."""

    def __init__(self, tied: bool, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(ROWS, WIDTH, dtype=torch.float64, **settings)
        with torch.no_grad():
            self.embedding.weight.normal_()
        self.head = nn.Linear(WIDTH, ROWS, bias=False, dtype=torch.float64)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.embedding(tokens).sum(1)))
        return found


def losses_of(module: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(module(batch), batch[:, 1], reduction="none")


def functional(tied: bool) -> FunctionalModel:
    return FunctionalModel(Words(tied, padding_idx=PADDING), example_losses=losses_of, dtype=torch.float64)


@dataclass(frozen=True)
class Made:
    model: FunctionalModel
    record: StepRecord
    shard: Shard


def made(tied: bool) -> Made:
    model = functional(tied)
    shard = Shard(batch=TOKENS, units=torch.arange(3), denominator=3.0, seed=0, rank=0)
    state = model.initial_state(SGD(), TOKENS)
    _, record = train_step(Recipe(model, SGD(), (0.1,), None), state, [shard])
    return Made(model, record, shard)


def ordinary_gradient(tied: bool, params: dict[str, Tensor]) -> dict[str, Tensor]:
    module = Words(tied, padding_idx=PADDING)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(params[name])
    (losses_of(module, TOKENS).sum() / 3).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_a_step_is_torchs_to_the_bit_and_leaves_the_padding_row_out(tied: bool) -> None:
    one = made(tied)
    params = {name: p.clone() for name, p in one.record.state.params.items()}
    expected = ordinary_gradient(tied, params)
    assert all(torch.equal(one.record.grads[name], expected[name]) for name in expected)
    graph = shard_graph(one.model, one.record, one.shard, 0, 3.0)
    assert all(torch.equal(graph.outputs[f"grad/{name}"], expected[name]) for name in expected)
    assert tied or (expected["embedding.weight"][PADDING] == 0).all()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_pullback_is_the_transpose_of_the_steps_gradient(tied: bool, lanes: int) -> None:
    one = made(tied)
    graph, params = shard_graph(one.model, one.record, one.shard, 0, 3.0), dict(one.record.state.params)
    generator = torch.Generator().manual_seed(1)
    cotangents = {
        f"grad/{n}": torch.randn((lanes, *p.shape), generator=generator, dtype=p.dtype) for n, p in params.items()
    }
    pulled = graph.merged(pull_lanes(graph.outputs, graph.inputs, cotangents, keep_graph=False))
    h, name = 1e-5, "embedding.weight"
    for row in (PADDING, 2):
        for column in range(WIDTH):
            ends = []
            for sign in (1, -1):
                moved = {n: p.clone() for n, p in params.items()}
                moved[name][row, column] += sign * h
                gradient = ordinary_gradient(tied, moved)
                ends.append(
                    [sum((cotangents[f"grad/{n}"][k] * g).sum() for n, g in gradient.items()) for k in range(lanes)]
                )
            for lane in range(lanes):
                difference = float(ends[0][lane] - ends[1][lane]) / (2 * h)
                found = pulled[list(params).index(name)]
                assert found is not None and float(found[lane][row, column]) == pytest.approx(difference, abs=1e-8)
    moving = pulled[list(params).index(name)]
    assert moving is not None and float(moving[:, PADDING].abs().max()) > 1e-3


def test_a_measurement_depends_on_the_padding_row() -> None:
    model = functional(tied=False)
    params = {name: p.clone().requires_grad_() for name, p in model.params.items()}
    phi = model.measurement(params, {}, lambda module: losses_of(module, TOKENS).mean())
    [found] = torch.autograd.grad(phi, [params["embedding.weight"]])
    assert float(found[PADDING].abs().max()) > 1e-3


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_whose_gradients_are_none_are_refused_by_name(settings: dict[str, Any]) -> None:
    [name] = settings
    with pytest.raises(InputError, match=f"the embedding 'embedding' has {name}="):
        FunctionalModel(Words(False, **settings), example_losses=losses_of, dtype=torch.float64)
