"""The optimizers of an experiment file, one section each, and their parameter groups. No torch, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from magic_pipeline.attribution.section import Section

Beta = Annotated[float, Field(strict=True, ge=0, lt=1)]
_OPTIMIZER = "the optimizer: sgd, adam, adamw, adagrad, rmsprop or muon"
_EPS_ROOT = "added inside that square root; tiny values make scores fragile, 0 is torch's optimizer"
_SIGN = "moves by the sign of {}, which has no derivative: its scores would all be 0"
_NOT_SMOOTH = {
    "lion": _SIGN.format("an average"),
    "signsgd": _SIGN.format("the gradient"),
    "rprop": _SIGN.format("the gradient"),
    "adamax": "divides by a running maximum, which has a kink wherever it changes",
    "lbfgs": "chooses its steps by a search, which has no derivative",
}


class GroupSettings(Section):
    """Parameters with settings of their own, as in torch's parameter groups."""

    match: str = Field(
        min_length=1, description="a regular expression that is found in the names of the group's parameters"
    )
    lr: float | None = Field(
        default=None, gt=0, description="the group's own learning rate, which the schedule multiplies"
    )
    lr_factor: float = Field(default=1.0, gt=0, description="times the learning rate")
    weight_decay: float | None = Field(default=None, ge=0, description="the group's own weight decay; null keeps it")
    momentum: float | None = Field(default=None, ge=0, description="the group's own momentum; null keeps it")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] | None = Field(
        default=None, description="the group's own betas; null keeps them"
    )

    @field_validator("match")
    @classmethod
    def _is_a_pattern(cls, match: str) -> str:
        return _pattern(match)

    @model_validator(mode="after")
    def _one_rate(self) -> GroupSettings:
        if self.lr is not None and self.lr_factor != 1:
            raise ValueError("takes lr or lr_factor, not both")
        return self

    def changed(self) -> dict[str, Any]:
        """The optimizer's settings that the group has of its own."""
        found = self.model_dump(include={"weight_decay", "momentum", "betas"})
        return {name: value for name, value in found.items() if value is not None}


def _pattern(match: str) -> str:
    try:
        re.compile(match)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return match


class OptimizerSettings(Section):
    """What all optimizers have."""

    lr: float = Field(default=1e-3, gt=0, description="the learning rate that the schedule multiplies")
    groups: Annotated[tuple[GroupSettings, ...], Field(strict=False)] = Field(
        default=(), description="parameters with settings of their own; of several groups the first that matches counts"
    )

    @model_validator(mode="after")
    def _groups_set_what_there_is(self) -> OptimizerSettings:
        fields = type(self).model_fields
        own = set(fields) | (set(MuonAdamWSettings.model_fields) if "adamw" in fields else set())
        for number, group in enumerate(self.groups):
            for name in sorted(set(group.changed()) - own):
                known = ", ".join(n for n in GroupSettings.model_fields if n in own | {"lr_factor"})
                raise ValueError(f"groups[{number}] sets {name}, which this optimizer has not; a group may set {known}")
        return self


class SGDSettings(OptimizerSettings):
    """torch.optim.SGD."""

    name: Literal["sgd"] = Field(description=_OPTIMIZER)
    momentum: float = Field(default=0.0, ge=0, description="the momentum factor")
    nesterov: bool = Field(default=False, description="whether the momentum is Nesterov's")
    dampening: float = Field(
        default=0.0, ge=0, le=1, description="how much less than 1 a gradient adds to the momentum"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="coupled weight decay: added to the gradient")

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> SGDSettings:
        every = {self.momentum, *(g.momentum for g in self.groups if g.momentum is not None)}
        if self.nesterov and (0 in every or self.dampening != 0):
            raise ValueError("nesterov needs a momentum above 0 and no dampening")
        return self


class AdamWSettings(OptimizerSettings):
    """torch.optim.AdamW, with a term inside the square root that keeps its derivative finite."""

    name: Literal["adamw"] = Field(description=_OPTIMIZER)
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="decay rates of the first and the second moment"
    )
    eps: float = Field(default=1e-8, ge=0, description="added to the square root of the second moment")
    eps_root: float = Field(
        default=1e-8,
        ge=0,
        description=_EPS_ROOT,
    )
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled weight decay: times the learning rate")


class AdamSettings(OptimizerSettings):
    """torch.optim.Adam, with a term inside the square root that keeps its derivative finite."""

    name: Literal["adam"] = Field(description=_OPTIMIZER)
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.999), description="decay rates of the first and the second moment"
    )
    eps: float = Field(default=1e-8, ge=0, description="added to the square root of the second moment")
    eps_root: float = Field(
        default=1e-8,
        ge=0,
        description=_EPS_ROOT,
    )
    weight_decay: float = Field(default=0.0, ge=0, description="coupled weight decay: added to the gradient")


class AdagradSettings(OptimizerSettings):
    """torch.optim.Adagrad, with a term inside the square root that keeps its derivative finite."""

    name: Literal["adagrad"] = Field(description=_OPTIMIZER)
    lr_decay: float = Field(default=0.0, ge=0, description="the learning rate is divided by 1 + step * lr_decay")
    initial_accumulator_value: float = Field(
        default=0.0, ge=0, description="of the sum of squares, before the first step"
    )
    eps: float = Field(default=1e-10, ge=0, description="added to the square root of the sum of squares")
    eps_root: float = Field(
        default=1e-8,
        ge=0,
        description=_EPS_ROOT,
    )
    weight_decay: float = Field(default=0.0, ge=0, description="coupled weight decay: added to the gradient")


class RMSpropSettings(OptimizerSettings):
    """torch.optim.RMSprop, with a term inside the square root that keeps its derivative finite."""

    name: Literal["rmsprop"] = Field(description=_OPTIMIZER)
    alpha: float = Field(default=0.99, ge=0, lt=1, description="the decay rate of the averages")
    momentum: float = Field(default=0.0, ge=0, description="the momentum factor")
    centered: bool = Field(default=False, description="whether the variance takes the place of the second moment")
    eps: float = Field(default=1e-8, ge=0, description="added to the square root")
    eps_root: float = Field(
        default=1e-8,
        ge=0,
        description=_EPS_ROOT,
    )
    weight_decay: float = Field(default=0.0, ge=0, description="coupled weight decay: added to the gradient")


class MuonAdamWSettings(Section):
    """The AdamW part of Muon, for the parameters that are no hidden matrices."""

    lr: float | None = Field(
        default=None, gt=0, description="its learning rate, which the schedule multiplies; null: Muon's"
    )
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="decay rates of the first and the second moment"
    )
    eps: float = Field(default=1e-8, ge=0, description="added to the square root of the second moment")
    eps_root: float = Field(default=1e-8, ge=0, description=_EPS_ROOT)
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled weight decay: times the learning rate")


class MuonSettings(OptimizerSettings):
    """torch.optim.Muon with Newton-Schulz in the run's dtype, and AdamW for the other parameters."""

    name: Literal["muon"] = Field(description=_OPTIMIZER)
    match: str | None = Field(
        default=None,
        min_length=1,
        description="a regular expression: matrices with such names are Muon's; null: all but embeddings' and the last layer's",
    )
    momentum: float = Field(default=0.95, ge=0, lt=1, description="the momentum factor")
    nesterov: bool = Field(default=True, description="whether the momentum is Nesterov's")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay: times the learning rate")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = Field(
        default=None, description="how the learning rate goes with a matrix's shape: original (null) or match_rms_adamw"
    )
    ns_coefficients: Annotated[tuple[float, float, float], Field(strict=False)] = Field(
        default=(3.4445, -4.7750, 2.0315), description="of the Newton-Schulz iteration"
    )
    ns_steps: int = Field(default=5, ge=1, lt=100, description="Newton-Schulz iterations")
    eps: float = Field(default=1e-7, gt=0, description="the smallest norm that a matrix is divided by")
    adamw: MuonAdamWSettings = Field(
        default=MuonAdamWSettings(), description="of the parameters that Muon does not move"
    )

    @field_validator("match")
    @classmethod
    def _is_a_pattern(cls, match: str | None) -> str | None:
        return None if match is None else _pattern(match)

    @model_validator(mode="after")
    def _momentum_below_one(self) -> MuonSettings:
        if any(group.momentum is not None and group.momentum >= 1 for group in self.groups):
            raise ValueError("a group's momentum should be less than 1")
        return self


def refuse_what_is_not_smooth(optimizer: object) -> None:
    """Raises ValueError, with the reason, for an optimizer that has no derivative where it matters."""
    if not isinstance(optimizer, Mapping):
        return
    if (reason := _NOT_SMOOTH.get(str(optimizer.get("name")))) is not None:
        raise ValueError(f"{optimizer['name']} {reason}; take adamw")
    if optimizer.get("amsgrad"):
        raise ValueError("amsgrad divides by a running maximum, which has a kink wherever it changes; leave it out")
