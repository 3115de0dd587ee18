"""Saves that are made while training and the walk go on: the same bits, never two steps at a time, no error lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from magic_pipeline.attribution import cohort, rank_parts, training
from magic_pipeline.attribution.observing import CheckpointSealed
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.checkpoints import COMPLETE_STEP, background
from magic_pipeline.errors import InterruptedWalkError, StorageError
from tests.attribution.running import keys, open_small, run, same_bits

Seal = Callable[..., Any]


@pytest.fixture(autouse=True)
def every_save_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "WORTH_A_THREAD", 0)


@pytest.fixture
def around_seal(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Seal, int], Any]], None]:
    """Wraps every seal: `around(seal, step)` calls `seal()`."""
    original = rank_parts.seal_together

    def wrap(around: Callable[[Seal, int], Any]) -> None:
        def sealing(board: Any, chain: Any, lease: Any, step: int, parts: Any, facts: Any) -> Any:
            if step == COMPLETE_STEP:
                return original(board, chain, lease, step, parts, facts)
            return around(lambda: original(board, chain, lease, step, parts, facts), step)

        for module in (cohort, training):
            monkeypatch.setattr(module, "seal_together", sealing)

    return wrap


def test_the_scores_have_the_same_bits_and_every_seal_is_told(tmp_path: Path, undisturbed: Any) -> None:
    events: list[CheckpointSealed] = []
    opened = open_small(tmp_path)
    found = run(opened, observe=lambda event: events.append(event) if isinstance(event, CheckpointSealed) else None)
    assert same_bits(found, undisturbed())
    assert [event.step for event in events if event.key is None] == [0, 2, 4, 6]
    assert [(event.step, event.key) for event in events if event.key] == [(s, k) for s in (4, 2) for k in keys(opened)]
    assert verify_experiment(opened).findings == ()


def test_compute_goes_on_meanwhile_and_two_steps_are_never_saved_at_once(
    tmp_path: Path, around_seal: Callable[..., None], undisturbed: Any
) -> None:
    sealing: set[int] = set()
    together: list[set[int]] = []
    in_main: list[bool] = []

    def slow(seal: Seal, step: int) -> Any:
        sealing.add(step)
        together.append(set(sealing))
        in_main.append(threading.current_thread() is threading.main_thread())
        time.sleep(0.1)
        try:
            return seal()
        finally:
            sealing.discard(step)

    around_seal(slow)
    assert same_bits(run(open_small(tmp_path)), undisturbed())
    assert max(map(len, together)) == 1 and not any(in_main)


@pytest.mark.parametrize("step", [4, 2])
def test_a_save_that_fails_ends_the_walk_and_a_rerun_loses_nothing_sealed(
    tmp_path: Path, around_seal: Callable[..., None], undisturbed: Any, step: int
) -> None:
    opened = open_small(tmp_path)
    train(opened)
    broken = [True]

    def failing(seal: Seal, at: int) -> Any:
        if broken and at == step:
            raise StorageError("the disk is gone")
        return seal()

    around_seal(failing)
    with pytest.raises(StorageError, match="the disk is gone"):
        walk(opened, keys(opened))
    assert {query.step for query in query_statuses(opened)} == {None if step == 4 else 4}
    broken.clear()
    assert same_bits(run(opened), undisturbed())


def test_an_interrupt_waits_for_the_save_under_way_and_seals_where_it_stands(
    tmp_path: Path, around_seal: Callable[..., None], undisturbed: Any
) -> None:
    def slow(seal: Seal, step: int) -> Any:
        time.sleep(0.2)
        return seal()

    opened = open_small(tmp_path)
    train(opened)
    around_seal(slow)
    asked = [0]

    def at_step_3() -> bool:
        asked[0] += 1
        return asked[0] > len((6, 5, 4, 4))  # 4 ends a segment and begins the next

    with pytest.raises(InterruptedWalkError, match="step 3"):
        walk(opened, keys(opened), should_stop=at_step_3)
    assert {query.step for query in query_statuses(opened)} == {3}
    found = run(opened)
    assert same_bits(found, undisturbed()) and torch.isfinite(found).all()
