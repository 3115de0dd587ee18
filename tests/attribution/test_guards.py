"""Fragile settings, and only those, are told before training, with reason and remedy; what would be wrong is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magic_pipeline.attribution.checking import check_before_training
from magic_pipeline.attribution.fragility import fragile_settings
from magic_pipeline.attribution.training import train
from magic_pipeline.errors import InputError
from tests.attribution.running import TASKS, open_small
from tests.attribution.small_task import CLASSES, FEATURES, SmallTask

HERE = "tests.attribution.test_guards"


class Bent(SmallTask):
    """Linear, `activation`, Linear: `dead` of its 8 units are far below 0, the first example is `factor` times as large."""

    def __init__(self, activation: str = "ReLU", dead: int = 0, factor: float = 1.0) -> None:
        super().__init__()
        self.activation, self.dead = activation, dead
        self.features[0] *= factor

    def build_model(self) -> nn.Module:
        first = nn.Linear(FEATURES, 8)
        with torch.no_grad():
            first.bias[: self.dead] = -20.0
        return nn.Sequential(first, getattr(nn, self.activation)(), nn.Linear(8, CLASSES))


class Pooled(SmallTask):
    """A max-pool over pairs of units, the second of a pair so much larger than the first."""

    def __init__(self, behind: float = 1.0) -> None:
        super().__init__()
        self.behind = behind

    def build_model(self) -> nn.Module:
        first = nn.Linear(FEATURES, 8)
        with torch.no_grad():
            first.weight[1::2] = first.weight[::2]
            first.bias[1::2] = first.bias[::2] + self.behind
        return nn.Sequential(first, nn.MaxPool1d(2), nn.Linear(4, CLASSES))


ADAMW = {"name": "adamw", "lr": 0.05, "betas": [0.9, 0.99], "eps_root": 1e-6}
STEADY: dict[str, Any] = {"training": {"optimizer": ADAMW}}


def bent(**settings: Any) -> dict[str, Any]:
    return {"task": {"type": f"{HERE}:Bent", **settings}}


def small(middle: str) -> dict[str, Any]:
    return {"task": {"type": f"{TASKS}:SmallTask", "middle": middle}}


def optimizer(**settings: Any) -> dict[str, Any]:
    return {"training": {"optimizer": ADAMW | settings}}


def batches(size: int) -> dict[str, Any]:
    return {"training": {"optimizer": ADAMW, "batch_size": size}}


WARNED = {
    "eps_root of 0": (optimizer(eps_root=0.0), STEADY, r"training.optimizer.eps_root is 0: .* fragile .*; take 1e-6"),
    "eps_root tiny": (optimizer(eps_root=1e-17), STEADY, r"training.optimizer.eps_root is 1e-17: .*; take 1e-6"),
    "eps_root of Muon's AdamW": (
        {"training": {"optimizer": {"name": "muon", "adamw": {"eps_root": 0.0}}}},
        {"training": {"optimizer": {"name": "sgd"}}},
        r"training.optimizer.eps_root is 0: ",
    ),
    "dropout": (
        STEADY | small("dropout"),
        small("dropout") | {"training": {"optimizer": ADAMW, "mode": "eval"}},
        r"dropout is active: .* predict retraining poorly; set it to 0",
    ),
    "batches of one": (batches(1), batches(4), r"24 of 24 steps have a batch of one example: .*; take a larger"),
    "a last batch of one": (batches(11), batches(6), r"2 of 4 steps have a batch of one example: .* divides the"),
    "dead units": (
        STEADY | bent(dead=5),
        STEADY | bent(activation="GELU", dead=5),
        r"5 of 8 units of relu in '1' are dead: they pass no gradient .*; take GELU",
    ),
    "inputs near a kink": (
        STEADY | bent(factor=3000.0),
        STEADY | bent(activation="Tanh", factor=3000.0),
        r"\d\d% of the inputs of relu in '1' are within 1% of their scale from a kink: .*; take GELU",
    ),
    "windows near a tie": (
        STEADY | {"task": {"type": f"{HERE}:Pooled", "behind": 1e-4}},
        STEADY | {"task": {"type": f"{HERE}:Pooled"}},
        r"100% of the inputs of max_pool1d in '1' are within 1% .* \(for a max-pool an average pool\)",
    ),
}


@pytest.mark.parametrize("guard", WARNED)
def test_a_fragile_setting_is_told_before_training_and_by_the_plan(
    guard: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fragile, steady, message = WARNED[guard]
    for folder, changes, told in (("fragile", fragile, True), ("steady", steady, False)):
        opened = open_small(tmp_path / folder, **changes)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "magic_pipeline"):
            check_before_training(opened)
        assert bool([text for text in caplog.messages if re.match(message, text)]) == told, caplog.messages
        assert bool([text for text in fragile_settings(opened) if re.match(message, text)]) == told
        assert told or not caplog.messages


def test_a_recipe_without_anything_fragile_is_told_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_small(tmp_path, **STEADY)
    with caplog.at_level(logging.WARNING, "magic_pipeline"):
        check_before_training(opened)
    assert caplog.messages == [] and fragile_settings(opened) == ()


def test_the_plan_names_kinks_and_middling_settings_too(tmp_path: Path) -> None:
    lines = fragile_settings(open_small(tmp_path, **bent()))
    assert [line for line in lines if line.startswith("the model has kinks (relu); tanh, GELU or SiLU are smooth")]
    assert [line for line in lines if line == "training.optimizer.eps_root is 1e-08; 1e-6 is steadier"]


class Replaced(SmallTask):
    """Linear, `middle`, Linear."""

    middle_layer: Callable[[], nn.Module]

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), self.middle_layer(), nn.Linear(4, CLASSES))


class SpectrallyNormalised(Replaced):
    def middle_layer(self) -> nn.Module:
        normalised: nn.Module = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        return normalised


class RunningInstances(Replaced):
    def middle_layer(self) -> nn.Module:
        norm = nn.InstanceNorm1d(1, track_running_stats=True)
        return nn.Sequential(nn.Unflatten(1, (1, 4)), norm, nn.Flatten())


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.detach())


class Gated(Replaced):
    """Its first derivative is not that of its values, so nothing that follows from it is a score."""

    def middle_layer(self) -> nn.Module:
        return Cut()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"task": {"type": f"{HERE}:SpectrallyNormalised"}},
            r"task: .*buffer '1.*\._[uv]' of .* without a gradient path",
        ),
        (
            {"task": {"type": f"{HERE}:RunningInstances"}},
            r"task: .*'1.1.running_mean' of InstanceNorm1d without a gradi",
        ),
        (
            {"task": {"type": f"{HERE}:Gated"}},
            r"task: the Hessian-vector product is .* off its central difference .*detach",
        ),
        (
            {"training": {"optimizer": {"name": "lion"}}},
            r"lion moves by the sign of an average, which has no derivative",
        ),
        ({"training": {"optimizer": {"name": "adamax"}}}, r"adamax divides by a running maximum, which has a kink"),
        (
            {"training": {"optimizer": ADAMW | {"amsgrad": True}}},
            r"amsgrad divides by a running maximum, which has a kink",
        ),
        (
            {"training": {"dtype": "bfloat16"}},
            r"line \d+: training.dtype: has to be float32 or .*: less rounds away .*bfloat16",
        ),
        (small("batch_norm") | {"ranks": 2}, r"ranks: training changes the model's buffer '1.running_mean'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_wrong_is_refused_before_training(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    def no_step(event: object) -> None:
        raise AssertionError(f"training began: {event}")

    with pytest.raises(InputError, match=message) as caught:
        train(open_small(tmp_path, **changes), observe=no_step)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sizes", [{"batch_size": 1}, {"batch_size": 11}, {"batch_size": 5, "microbatch_size": 4}], ids=str
)
def test_an_example_alone_before_batch_norm_is_refused_before_training(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"training.batch_size: BatchNorm in training needs more than one value"):
        check_before_training(open_small(tmp_path, **small("batch_norm"), training=sizes))
