"""Units that are flat on a whole batch and inputs close to a kink are counted, and nothing smooth is taken for a kink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.metagradient.kinks import Kink, observed_kinks
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.optimizers import SGD
from magic_pipeline.metagradient.step import Shard

ROWS = 0.08 * torch.arange(-50, 51, dtype=torch.float64)[:, None]  # one of them is exactly 0


class Scaled(nn.Module):
    """`function(scale * x)`, scale [units]."""

    def __init__(self, function: Callable[[Tensor], Tensor], scale: tuple[float, ...] = (1.0,)) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def kinks(module: nn.Module, *batches: Tensor) -> tuple[Kink, ...]:
    def losses(of: nn.Module, batch: Any) -> Tensor:
        found: Tensor = of(batch).flatten(1).sum(1)
        return found

    shards = [Shard(batch, torch.arange(len(batch)), float(len(batch)), seed=0) for batch in batches]
    model = FunctionalModel(module, example_losses=losses, dtype=torch.float64)
    return observed_kinks(model, model.initial_state(SGD(), batches[0]), shards)


@pytest.mark.parametrize(
    ("function", "name", "positions"),
    [
        (nn.ReLU(), "relu", [0]),
        (nn.ReLU(inplace=True), "relu", [0]),
        (torch.relu, "relu", [0]),
        (lambda x: x.relu(), "relu", [0]),
        (nn.LeakyReLU(), "leaky_relu", [0]),
        (nn.PReLU(), "prelu", [0]),
        (nn.ReLU6(), "hardtanh", [0]),
        (nn.Hardtanh(-2.0, 3.0), "hardtanh", [-2, 3]),
        (nn.Hardswish(), "hardswish", [-3, 3]),
        (nn.Hardsigmoid(), "hardsigmoid", [-3, 3]),
        (nn.Softshrink(1.0), "softshrink", [-1, 1]),
        (nn.Threshold(1.0, 0.0), "threshold", [1]),
        (nn.SELU(), "selu", [0]),
        (nn.ELU(0.5), "elu", [0]),
        (torch.abs, "abs", [0]),
        (lambda x: x.clamp(-1, 2), "clamp", [-1, 2]),
        (lambda x: x.clamp_max(2.0), "clamp_max", [2]),
    ],
)
def test_inputs_near_a_kink_are_counted(function: Any, name: str, positions: list[float]) -> None:
    reach = 0.01 * ROWS.square().mean().sqrt()
    x = torch.cat([ROWS, *(torch.tensor([[p - 0.9 * reach], [p + 0.9 * reach], [p + 1.5 * reach]]) for p in positions)])
    (kink,) = kinks(Scaled(function), x)
    assert (kink.function, kink.module, kink.units, kink.samples) == (
        name,
        "function" if isinstance(function, nn.Module) else "",
        1,
        len(x),
    )
    assert kink.near * len(x) == pytest.approx(2 * len(positions))
    assert kink.dead == 0


@pytest.mark.parametrize(
    "function",
    [nn.Tanh(), nn.GELU(), nn.SiLU(), nn.ELU(), nn.CELU(), nn.Softplus(), nn.AvgPool1d(1), lambda x: x.clamp(min=-9)],
    ids=["tanh", "gelu", "silu", "elu", "celu", "softplus", "avg_pool", "clamp without effect"],
)
def test_what_is_smooth_here_is_no_kink(function: Any) -> None:
    assert kinks(Scaled(function), ROWS) == ()


def test_what_does_not_depend_on_parameters_is_no_kink() -> None:
    class OfInputs(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.abs()).clamp(min=-9.0)

    assert kinks(OfInputs(torch.tanh), ROWS) == ()


def test_units_are_dead_where_all_shards_are_flat() -> None:
    positive = ROWS.abs() + 0.1
    (kink,) = kinks(Scaled(torch.relu, (1.0, -1.0, -1.0, 1.0)), positive, positive)
    assert (kink.units, kink.dead, kink.samples) == (4, 2, 2 * len(ROWS))
    assert kink.dead_share == pytest.approx(0.5)
    # The second shard wakes them.
    (kink,) = kinks(Scaled(torch.relu, (1.0, -1.0, -1.0, 1.0)), positive, -positive)
    assert kink.dead == 0
    # Of units that are flat on half of all rows, a quarter are flat on two.
    (kink,) = kinks(Scaled(torch.relu, (1.0, -1.0)), positive[:2])
    assert kink.dead_share == pytest.approx(0.25)


def test_the_units_after_a_convolution_are_channels() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 6), nn.ReLU())
    with torch.no_grad():
        module[0].bias.copy_(torch.tensor([-99.0, 0.0, -99.0, 99.0]))  # type: ignore[operator]
    images = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = kinks(module, images)
    assert (first.module, first.units, first.dead, first.samples) == ("1", 4, 2, 5 * 16)
    assert (second.module, second.units, second.samples) == ("4", 6, 5)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_max_pool_is_near_a_kink_where_two_are_nearly_equal(dimensions: int) -> None:
    pool: nn.Module = getattr(nn, f"MaxPool{dimensions}d")(2)
    x = torch.zeros(1, 1, *[4] * dimensions, dtype=torch.float64)
    flat = x.view(-1, 4)
    flat[0] = torch.tensor([1.0, 0.999, 2.0, 1.0])  # the first window has two nearly equal ones
    windows = 2**dimensions
    (kink,) = kinks(Scaled(pool), x)
    assert (kink.function, kink.dead) == (f"max_pool{dimensions}d", 0)
    # Windows of equal zeros are equal for a reason: they do not count.
    assert kink.near * windows == pytest.approx(1)


def test_a_padded_pool_with_strides_and_dilation_sees_the_windows_of_torch() -> None:
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    settings: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}
    (kink,) = kinks(Scaled(lambda x: F.max_pool2d(x, **settings)), x)
    assert (kink.units, kink.samples) == (3, F.max_pool2d(x, **settings)[:, 0].numel())


def test_looking_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in module.double().state_dict().items()}
    kinks(module, ROWS, ROWS)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
