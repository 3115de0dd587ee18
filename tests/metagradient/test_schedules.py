"""Learning rates are those of transformers' schedulers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.schedules import learning_rates

# (our name, our settings) -> (transformers' name, its settings)
SCHEDULES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "constant": ({}, "constant_with_warmup", {}),
    "linear": ({}, "linear", {}),
    "cosine": ({}, "cosine", {}),
    "cosine_with_restarts": ({}, "cosine_with_restarts", {}),
    "cosine_with_restarts three": ({"cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
    "polynomial": ({}, "polynomial", {}),
    "polynomial square": ({"power": 2.0, "lr_end": 0.01}, "polynomial", {"power": 2.0, "lr_end": 0.01}),
    "inverse_sqrt": ({}, "inverse_sqrt", {}),
    "inverse_sqrt of nine": ({"timescale": 9}, "inverse_sqrt", {"timescale": 9}),
}


def transformers_rates(name: str, lr: float, steps: int, warmup_steps: int, settings: dict[str, Any]) -> list[float]:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=None if name == "inverse_sqrt" else steps,
        scheduler_specific_kwargs=settings,
    )
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
            scheduler.step()
    return rates


LENGTHS = ((1, 0), (50, 0), (50, 1), (50, 7), (50, 50))
# Theirs divides by the steps after the warm-up.
CASES = [(case, *length) for case in SCHEDULES for length in LENGTHS if not (case[:4] == "poly" and length == (50, 50))]


@pytest.mark.parametrize(("case", "steps", "warmup_steps"), CASES)
def test_learning_rates_equal_transformers(case: str, steps: int, warmup_steps: int) -> None:
    ours, theirs, settings = SCHEDULES[case]
    expected = transformers_rates(theirs, 0.3, steps, warmup_steps, settings)
    found = learning_rates(case.partition(" ")[0], lr=0.3, steps=steps, warmup_steps=warmup_steps, **ours)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_table_is_taken_as_it_is() -> None:
    assert learning_rates("table", lr=9.0, steps=3, values=[0.1, 0.0, 0.3]) == (0.1, 0.0, 0.3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "table", "values": [0.1]}, "1 learning rates, the run has 3 steps"),
        ({"name": "table", "values": [0.1, float("nan"), 0.1]}, "step 1 is nan"),
        ({"name": "table", "values": [0.1, 0.1, -0.1]}, "step 2 is -0.1"),
        ({"name": "sine"}, "unknown schedule 'sine'"),
        ({"name": "polynomial", "lr_end": 0.2}, "the last learning rate, 0.2, should be below the first, 0.1"),
        ({"name": "linear", "warmup_steps": 4}, "4 warm-up steps are more than the run's 3 steps"),
    ],
)
def test_an_impossible_schedule_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        learning_rates(lr=0.1, steps=3, **settings)  # type: ignore[arg-type]
