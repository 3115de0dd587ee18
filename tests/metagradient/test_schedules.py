"""Learning rates are those of transformers' schedulers."""

from __future__ import annotations

import warnings

import pytest
import torch

from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.schedules import learning_rates

THEIR_NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def transformers_rates(name: str, lr: float, steps: int, warmup_steps: int) -> list[float]:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = get_scheduler(THEIR_NAMES[name], optimizer, num_warmup_steps=warmup_steps, num_training_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
            scheduler.step()
    return rates


@pytest.mark.parametrize("name", THEIR_NAMES)
@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (50, 0), (50, 1), (50, 7), (50, 50)])
def test_learning_rates_equal_transformers(name: str, steps: int, warmup_steps: int) -> None:
    expected = transformers_rates(name, 0.3, steps, warmup_steps)
    found = learning_rates(name, lr=0.3, steps=steps, warmup_steps=warmup_steps)
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
        ({"name": "linear", "warmup_steps": 4}, "4 warm-up steps are more than the run's 3 steps"),
    ],
)
def test_an_impossible_schedule_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        learning_rates(lr=0.1, steps=3, **settings)  # type: ignore[arg-type]
