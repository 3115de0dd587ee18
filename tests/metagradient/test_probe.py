"""The probe passes models whose second derivatives are right, and finds those whose are not, whatever makes them so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.optimizers import SGD
from magic_pipeline.metagradient.probe import ProbeReport, probe
from magic_pipeline.metagradient.step import Recipe, Shard, train_step
from magic_pipeline.metagradient.walk import Lanes, walk_segment
from tests.reference import models

generator = torch.Generator().manual_seed(0)
ROWS = torch.randn(8, 5, generator=generator, dtype=torch.float64)
IMAGES = torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def cross_entropy(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"], reduction="none")


def probed(
    module: nn.Module,
    x: Tensor = ROWS,
    *,
    losses: Callable[[nn.Module, Any], Tensor] = cross_entropy,
    measurement: Callable[[nn.Module, Callable[[Any], Any]], Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
) -> ProbeReport:
    batch = {"x": x, "y": LABELS[: len(x)]}
    shard = Shard(batch, torch.arange(len(x)), float(len(x)), seed=seed)
    return probe(
        module,
        shard,
        example_losses=losses,
        measurement=measurement or (lambda m, place: losses(m, place(batch)).mean()),
        train_mode=True,
        dtype=dtype,
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])
        return out


GOOD: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tanh": (lambda: models.mlp(), ROWS),
    "dropout": (lambda: models.mlp(dropout=0.3), ROWS),
    "relu": (lambda: models.seeded(1, lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))), ROWS),
    "batch norm": (lambda: models.conv_net(), IMAGES),
    "lstm": (lambda: models.seeded(1, Recurrent), ROWS),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", GOOD)
def test_models_with_right_second_derivatives_pass(name: str, dtype: torch.dtype) -> None:
    build, x = GOOD[name]
    report = probed(build(), x, dtype=dtype)
    assert report.batchable
    assert report.inconclusive == ()
    assert max(report.errors.values()) < (1e-6 if dtype == torch.float64 else report.tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_language_model_passes_with_either_attention(attention: str, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 13, (4, 8), generator=torch.Generator().manual_seed(1))

    def losses(module: nn.Module, batch: Any) -> Tensor:
        logits = module(batch["x"]).logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, batch["x"][:, 1:], reduction="none").sum(1)

    report = probed(models.gpt2(attention=attention, dropout=0.1), tokens, losses=losses, dtype=dtype)
    assert report.inconclusive == ()
    assert max(report.errors.values()) < (1e-6 if dtype == torch.float64 else report.tolerance)


def test_differences_across_many_kinks_are_inconclusive_and_not_held_against_the_model() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(600, 5, generator=generator, dtype=torch.float64), torch.arange(600) % 3
    layers = (nn.Linear(5, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
    module = models.seeded(1, lambda: nn.Sequential(*layers))
    shard = Shard({"x": x, "y": y}, torch.arange(600), 600.0, seed=3)
    reports = [
        probe(
            module,
            shard,
            example_losses=cross_entropy,
            measurement=lambda m, place: cross_entropy(m, place({"x": x[:1], "y": y[:1]})).mean(),
            train_mode=True,
            dtype=dtype,
        )
        for dtype in (torch.float32, torch.float64)
    ]
    assert "the Hessian-vector product" in reports[0].inconclusive
    assert reports[1].inconclusive == ()
    assert max(reports[1].errors.values()) < reports[1].tolerance


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return grad * (1 - x.tanh() ** 2)


class DetachedBackward(torch.autograd.Function):
    """Right to first order; the second derivative silently misses its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return grad * (1 - x.detach().tanh() ** 2)


class Through(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return models.seeded(1, lambda: nn.Sequential(nn.Linear(5, 7), Through(function), nn.Linear(7, 3)))


@pytest.mark.parametrize("function", [OnceDifferentiable, DetachedBackward], ids=lambda f: f.__name__)
def test_a_missing_second_derivative_is_found(function: type[torch.autograd.Function]) -> None:
    with pytest.raises(InputError, match="off its central difference"):
        probed(between(lambda x: function.apply(x)))  # type: ignore[no-untyped-call]


class Checkpointed(nn.Module):
    """Recomputes its first layer in the backward, when functional_call has put the module's own parameters back."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.use_reentrant = nn.Linear(5, 7), nn.Linear(7, 3), use_reentrant

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            hidden = self.hidden(x)
        else:
            hidden = checkpoint(self.hidden, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)
        out: Tensor = self.last(hidden)
        return out


def test_gradient_checkpointing_of_the_models_own_is_found_though_it_is_right_at_the_first_step() -> None:
    plain, checkpointed = (models.seeded(1, lambda use=use: Checkpointed(use)) for use in (None, False))  # type: ignore[misc]
    wrong = (_walked(plain, chunk=1) - _walked(checkpointed, chunk=1)).norm() / _walked(plain, chunk=1).norm()
    assert wrong > 0.01
    for module in (checkpointed, models.seeded(1, lambda: Checkpointed(True))):
        with pytest.raises(InputError, match="gradient checkpointing"):
            probed(module)
    assert max(probed(plain).errors.values()) < 1e-6


def test_hugging_faces_gradient_checkpointing_is_switched_off() -> None:
    module: Any = models.gpt2()
    module.activation_checkpointing_enable()
    assert any(getattr(child, "gradient_checkpointing", False) for child in module.modules())
    FunctionalModel(module, example_losses=cross_entropy, dtype=torch.float64)
    assert not any(getattr(child, "gradient_checkpointing", False) for child in module.modules())


def test_a_detach_in_the_loss_is_found() -> None:
    def focal(module: nn.Module, batch: Any) -> Tensor:
        losses = cross_entropy(module, batch)
        return losses * (1 - torch.exp(-losses.detach())) ** 2

    with pytest.raises(InputError, match="a detach"):
        probed(models.mlp(), losses=focal)


def through(dtype: torch.dtype) -> nn.Module:
    return between(lambda x: torch.tanh(x).to(dtype).to(x.dtype))


def loss_in(dtype: torch.dtype) -> Callable[[nn.Module, Any], Tensor]:
    def losses(module: nn.Module, batch: Any) -> Tensor:
        logits = module(batch["x"])
        return F.cross_entropy(logits.to(dtype).float(), batch["y"], reduction="none").to(logits.dtype)

    return losses


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_to_low_precision_is_found_in_float64_and_told_in_float32(low: torch.dtype) -> None:
    with pytest.raises(InputError, match="lower precision"):
        probed(models.mlp(), losses=loss_in(low))
    with pytest.raises(InputError, match="lower precision"):
        probed(through(low))
    if low == torch.bfloat16:
        assert "the Hessian-vector product" in probed(through(low), dtype=torch.float32).inconclusive


def test_a_cast_to_float32_is_precise_enough() -> None:
    """Stock code of language models casts in its norms and its softmax, whatever the model's dtype."""
    for report in (probed(models.mlp(), losses=loss_in(torch.float32)), probed(through(torch.float32))):
        assert report.inconclusive == ()


@pytest.mark.parametrize("seed", [25, 82, 118])  # directions along which this measurement is nearly flat
def test_a_measurement_that_a_direction_hardly_changes_is_not_held_against_the_model(seed: int) -> None:
    """Its derivative along one random direction can be 0 by chance; rounding is compared with what is usual."""
    report = probed(models.mlp(), losses=loss_in(torch.float32), seed=seed)
    assert report.inconclusive == ()
    assert report.errors["the query's measurement"] < report.tolerance


class NormAtZero(nn.Module):
    """The gradient of a norm at 0 is 0 to torch; its second derivative is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.shift = nn.Linear(5, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x) + self.shift.norm()
        return out


def test_derivatives_that_are_not_finite_are_found() -> None:
    with pytest.raises(InputError, match="the Hessian-vector product is not finite"):
        probed(models.seeded(1, NormAtZero))
    with pytest.raises(InputError, match="the query's measurement is not finite"):
        probed(models.mlp(), measurement=lambda m, place: m(place(ROWS)).mean() * float("nan"))
    with pytest.raises(InputError, match="not finite"):
        probed(models.mlp(), losses=lambda m, batch: cross_entropy(m, batch) * float("nan"))


def test_losses_or_a_measurement_that_nothing_can_be_differentiated_through_are_refused_by_name() -> None:
    def without_gradient(module: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            return cross_entropy(module, batch)

    batch = {"x": ROWS, "y": LABELS}
    with pytest.raises(InputError, match="example_losses gave a result without a gradient path"):
        probed(models.mlp(), losses=without_gradient)
    for measured in (without_gradient, lambda m, b: cross_entropy(m, b).detach(), lambda m, b: torch.zeros(8)):
        with pytest.raises(InputError, match="the query's measurement gave a result without a gradient path"):
            probed(models.mlp(), measurement=lambda m, place, f=measured: f(m, place(batch)).mean())  # type: ignore[misc]


def test_a_measurement_whose_gradient_path_is_cut_in_part_is_found() -> None:
    head = models.mlp()

    def detached(module: nn.Module, place: Callable[[Any], Any]) -> Tensor:
        first: Any = module.get_submodule("0")
        hidden = torch.tanh(first(place(ROWS))).detach()
        last: Any = module.get_submodule("2")
        out: Tensor = last(hidden).square().mean()
        return out

    with pytest.raises(InputError, match="measurement"):
        probed(head, measurement=detached)


def test_the_given_module_and_the_ambient_generator_are_left_as_they_were() -> None:
    module = models.mlp(dropout=0.3).train()
    before, ambient = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    probed(module)
    with pytest.raises(InputError):
        probed(module, losses=loss_in(torch.bfloat16))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), ambient)
    assert module.training
    assert all(p.grad is None for p in module.parameters())


class Unbatchable(torch.autograd.Function):
    """tanh, twice differentiable, whose backward looks at values: no batched tensor has any."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if not bool(torch.isfinite(grad).all()):
            raise ValueError("a gradient that is not finite")
        result: Tensor = grad * (1 - Through(Unbatchable.apply)(x) ** 2)
        return result


def test_an_operation_that_cannot_be_batched_is_told_and_walked_one_lane_at_a_time() -> None:
    module, plain = between(lambda x: Unbatchable.apply(x)), between(torch.tanh)  # type: ignore[no-untyped-call]
    report = probed(module)
    assert not report.batchable
    scores = [_walked(m, chunk=1) for m in (module, plain)]
    assert torch.allclose(scores[0], scores[1], rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError):
        _walked(module, chunk=2)


def _walked(module: nn.Module, chunk: int) -> Tensor:
    """Scores of two lanes through three steps of SGD, from ones as cotangents."""
    model = FunctionalModel(copy.deepcopy(module), example_losses=cross_entropy, dtype=torch.float64)
    shard = Shard({"x": ROWS, "y": LABELS}, torch.arange(8), 8.0, seed=0)
    recipe = Recipe(model, SGD(momentum=0.9), (0.1,) * 3)
    start = model.initial_state(recipe.optimizer, shard.batch)
    state = start
    for _ in range(3):
        state, _ = train_step(recipe, state, [shard])
    lanes = Lanes.empty(state, 2, 8)
    for lane in range(2):
        ones = {name: torch.full_like(t, lane + 1.0) for name, t in lanes.cotangent.lane(lane).items()}
        lanes.join(lane, ones, torch.zeros(8, dtype=torch.float64))
    for _ in walk_segment(recipe, lambda step: [shard], start, 3, lanes, chunk=chunk):
        pass
    return lanes.scores
