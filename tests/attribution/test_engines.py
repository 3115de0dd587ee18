"""The engine is chosen when a walk is planned, kept when it resumes, and never needed: without it the walk goes on and says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.attribution import engines
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walk_plan import WalkPlan
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InterruptedWalkError
from magic_pipeline.metagradient.compiled import CannotCompileError, form_of
from magic_pipeline.metagradient.step import train_step
from tests.attribution.running import keys, open_small, relative_error, run, same_bits, stop_after
from tests.attribution.test_independence import Undisturbed, plan_of

COMPILED: dict[str, Any] = {"attribution": {"engine": "compiled"}}
# The compiler's own imports do it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def test_a_compiled_walk_has_the_scores_of_an_eager_one_and_resumes_to_the_same_bits(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    whole = open_small(tmp_path / "whole", **COMPILED)
    found = run(whole)
    plan = plan_of(whole)
    assert (plan.engine, len(plan.forms), plan.chunk) == ("compiled", 1, 1)
    assert relative_error(found, undisturbed()) < 1e-10
    stopped = open_small(tmp_path / "stopped", **COMPILED)
    train(stopped)
    with pytest.raises(InterruptedWalkError):
        walk(stopped, keys(stopped), should_stop=stop_after(3))
    # Settings may change meanwhile: the plan holds.
    assert same_bits(run(open_small(tmp_path / "stopped", attribution={"engine": "eager"})), found)


def test_without_a_compiler_the_walk_is_eager_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, undisturbed: Undisturbed
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    opened = open_small(tmp_path, **COMPILED)
    assert relative_error(run(opened), undisturbed()) < 1e-10
    assert plan_of(opened).engine == "eager"
    assert "no C++ compiler" in caplog.text


def test_a_walk_that_was_planned_compiled_goes_on_without_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_small(tmp_path)
    train(opened)
    walk(opened, keys(opened))
    shard = opened.shards(0, None)[0]
    plan = replace(plan_of(opened), engine="compiled", forms=(form_of(shard),))

    def missing(*_: Any) -> Any:
        raise CannotCompileError("no compiler")

    monkeypatch.setattr("magic_pipeline.metagradient.compiled.compile_shard", missing)
    engine = engines.engine_of(opened, plan)
    _, record = train_step(opened.recipe, opened.initial_state, [shard])
    engine.shard_graph(opened.recipe.model, record, shard, 0, shard.denominator)
    assert "planned with the compiled engine" in caplog.text


def test_auto_does_not_compile_for_a_short_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "compile_shard", pytest.fail)
    opened = open_small(tmp_path)
    run(opened)
    assert plan_of(opened).engine == "eager"


def test_plans_of_before_there_were_engines_are_eager(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    train(opened)
    walk(opened, keys(opened))
    content = plan_of(opened).as_dict()
    del content["engine"], content["forms"]
    assert WalkPlan.from_dict(content) == plan_of(opened)
