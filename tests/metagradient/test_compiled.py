"""The compiled engine gives the eager engine's scores, and where it cannot be had the eager one is used, with the reason.

Most tests run the recorded and cut graphs without a compiler, which is what can be wrong here; one compiles. Larger models and the
agreement of processes are checked by `benchmarks/walk.py --engine compiled`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.metagradient import optimizers
from magic_pipeline.metagradient.compiled import CannotCompileError, CompiledEngine, compile_shard, form_of
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.pullback import pull_back
from magic_pipeline.metagradient.state import Cotangent
from magic_pipeline.metagradient.step import Recipe, Shard, StepRecord, train_step
from tests.metagradient import cases, running
from tests.metagradient.test_padded_embeddings import TOKENS, Words, made
from tests.reference.problem import SGD, Problem
from tests.reference.unrolled import unrolled_scores


def uncompiled(half: torch.fx.GraphModule) -> Any:
    return half


def engine_for(problem: Problem, compiler: Any = uncompiled) -> tuple[CompiledEngine, list[str]]:
    """An engine for all of a problem's forms, and the reasons why it could not be had."""
    reasons: list[str] = []
    forms = frozenset(form_of(shard) for step in range(len(problem.steps)) for shard in running.data(problem)(step))
    return CompiledEngine(forms, lambda error: reasons.append(str(error)), compiler), reasons


@pytest.mark.parametrize("micro", [2])
@pytest.mark.parametrize("family", [name for name in cases.FAMILIES if "dropout" not in name])
def test_recorded_pullbacks_give_the_unrolled_scores(family: str, micro: int) -> None:
    problem = cases.FAMILIES[family].problem(cases.OPTIMIZERS["adamw"], clip_norm=0.5, micro=micro)
    engine, reasons = engine_for(problem)
    assert running.relative_error(running.walk(problem, engine=engine), unrolled_scores(problem)) < 1e-9
    assert not reasons


# The compiler's own imports do it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_scores_are_the_eager_ones() -> None:
    problem = cases.FAMILIES["mlp"].problem(SGD(0.9))
    engine, reasons = engine_for(problem, compiler=None)
    found = running.walk(problem, engine=engine)
    assert running.relative_error(found, running.walk(problem)) < 1e-10
    assert torch.equal(found, running.walk(problem, engine=engine))
    assert not reasons


def test_a_model_that_draws_at_random_is_walked_eagerly() -> None:
    problem = cases.FAMILIES["mlp-dropout"].problem(SGD(0.9))
    engine, reasons = engine_for(problem)
    assert torch.equal(running.walk(problem, engine=engine), running.walk(problem))
    assert reasons and "draws at random" in reasons[0]


@pytest.mark.parametrize("tied", [False, True])
def test_padding_rows_count_as_in_the_eager_engine(tied: bool) -> None:
    case = made(tied)
    compile_shard(case.model, case.record, case.shard, 0, 3.0, uncompiled)  # compares, and raises where they differ


def test_scores_of_tokens_go_where_the_eager_engine_puts_them() -> None:
    def losses(module: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(
            module(batch).unsqueeze(1).expand(-1, 3, -1).flatten(0, 1), batch.flatten(), reduction="none"
        ).view(3, 3)

    model = FunctionalModel(Words(True), example_losses=losses, dtype=torch.float64)
    places = torch.tensor([[0, 1, -1], [2, 3, 4], [-1, 5, 6]])
    shard = Shard(TOKENS, torch.arange(3), 9.0, 0, places=places)
    recipe = Recipe(model, optimizers.SGD(), (0.1,))
    _, record = train_step(recipe, model.initial_state(recipe.optimizer, TOKENS), [shard])
    generator = torch.Generator().manual_seed(0)
    params = {
        n: torch.randn(2, *p.shape, dtype=torch.float64, generator=generator) for n, p in record.state.params.items()
    }
    found, expected = torch.zeros(2, 7, dtype=torch.float64), torch.zeros(2, 7, dtype=torch.float64)
    engine = CompiledEngine(frozenset({form_of(shard)}), lambda error: pytest.fail(str(error)), uncompiled)
    pull_back(recipe, record, [shard], Cotangent(params, {}, {}), found, chunk=1, engine=engine)
    pull_back(recipe, record, [shard], Cotangent(params, {}, {}), expected, chunk=2)
    assert expected.abs().min() > 1e-4
    assert (found - expected).abs().max() < 1e-12


def _doubled(half: torch.fx.GraphModule) -> Any:
    return lambda *arguments: [
        2 * part if torch.is_tensor(part) and part.is_floating_point() else part for part in half(*arguments)
    ]


def test_code_that_computes_something_else_is_refused() -> None:
    case = made(True)
    with pytest.raises(CannotCompileError, match="off the eager engine's"):
        compile_shard(case.model, case.record, case.shard, 0, 3.0, _doubled)


def test_a_model_that_looks_at_values_is_refused() -> None:
    def losses(module: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = module(batch).sum(1)
        return found if math.isfinite(float(found.detach().sum())) else found * 2

    model = FunctionalModel(Words(True), example_losses=losses, dtype=torch.float64)
    shard = Shard(TOKENS, torch.arange(3), 3.0, 0)
    state = model.initial_state(optimizers.SGD(), TOKENS)
    record = StepRecord(state, state.params, (state.buffers,), (state.counters,), 0.0)
    with pytest.raises(CannotCompileError):
        compile_shard(model, record, shard, 0, 3.0, uncompiled)


def test_forms_tell_shapes_and_settings_apart_and_nothing_else() -> None:
    shard = Shard({"tokens": TOKENS, "width": 3}, torch.arange(3), 3.0, 0)
    assert form_of(shard) == form_of(replace(shard, batch={"tokens": TOKENS + 1, "width": 3}, denominator=2.0, seed=5))
    for other in (
        {"tokens": TOKENS[:, :2], "width": 3},
        {"tokens": TOKENS, "width": 4},
        {"tokens": TOKENS.int(), "width": 3},
    ):
        assert form_of(shard) != form_of(replace(shard, batch=other))
