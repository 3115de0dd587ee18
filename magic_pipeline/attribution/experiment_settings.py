"""The sections of an experiment file as immutable models. No torch, no I/O.

Every field's description is its documentation, in the docs and in the UI. What one field's value may be belongs here;
reading a file and wording its errors belongs to `experiment`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from magic_pipeline.attribution.optimizer_settings import (
    AdagradSettings,
    AdamSettings,
    AdamWSettings,
    MuonSettings,
    RMSpropSettings,
    SGDSettings,
    refuse_what_is_not_smooth,
)
from magic_pipeline.attribution.section import Section

_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def _word_or_count(word: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value == word or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError(f"should be {word} or a whole number of at least 1")

    return check


def _auto_or_bytes(value: object) -> object:
    """Bytes of a size such as `8GiB`, `512 MiB` or `1.5GB` (powers of 1024 with an i, of 1000 without)."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B)", value) if isinstance(value, str) else None
    count = int(Decimal(size[1]) * _UNITS[size[2]]) if size else 0
    if count < 1:
        raise ValueError("should be auto, a size such as 8GiB or 512MB, or a whole number of bytes")
    return count


def _one_or_more_fractions(value: object) -> object:
    """A number, or a list of different numbers, between 0 and 1 as a tuple."""
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    numbers = [one for one in found if isinstance(one, float) and 0 < one < 1]
    if not found or len(numbers) < len(found) or len(set(found)) < len(found):
        raise ValueError("should be a number between 0 and 1, or a list of different ones")
    return found


AutoOrCount = Annotated[Literal["auto"] | int, BeforeValidator(_word_or_count("auto"))]
SegmentOrCount = Annotated[Literal["segment"] | int, BeforeValidator(_word_or_count("segment"))]
AutoOrBytes = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_bytes)]
Fractions = Annotated[tuple[float, ...], BeforeValidator(_one_or_more_fractions)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=4096)]
File = Annotated[str, Field(min_length=1)]


_SCHEDULE = "the schedule after the warm-up: constant, linear, cosine, cosine_with_restarts, polynomial or inverse_sqrt; or table"


class TaskSettings(Section):
    """What is attributed: a task's type, and the settings that its class takes (all other fields)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(
        pattern=r"^([a-z][a-z0-9_]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)$",
        description="a ready-made task's name, such as digits_classifier, or a class as package.module:ClassName",
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The fields beside `type`: the keyword arguments of the task's class."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _plain_settings(self) -> TaskSettings:
        for name, value in self.settings.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"the setting {name!r} should be plain, finite data: {error}") from None
        return self


class WarmupSchedule(Section):
    """The learning-rate factors of transformers' get_scheduler."""

    name: Literal["constant", "linear", "cosine"] = Field(description=_SCHEDULE)
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the learning rate rises linearly from 0")


class RestartSchedule(Section):
    """Several half cosines, as transformers' cosine_with_restarts."""

    name: Literal["cosine_with_restarts"] = Field(description=_SCHEDULE)
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the learning rate rises linearly from 0")
    cycles: int = Field(default=1, ge=1, description="half cosines after the warm-up")


class PolynomialSchedule(Section):
    """A power of the steps left, as transformers' polynomial."""

    name: Literal["polynomial"] = Field(description=_SCHEDULE)
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the learning rate rises linearly from 0")
    power: float = Field(default=1.0, gt=0, description="of the part of the steps that is left")
    lr_end: float = Field(default=1e-7, ge=0, description="the learning rate at the end")


class InverseSqrtSchedule(Section):
    """1 / sqrt(step), as transformers' inverse_sqrt."""

    name: Literal["inverse_sqrt"] = Field(description=_SCHEDULE)
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the learning rate rises linearly from 0")
    timescale: int | None = Field(
        default=None, ge=1, description="steps in which it falls to 1 / sqrt(2); null takes the warm-up's, or 10,000"
    )


class TableSchedule(Section):
    """Learning rates of the user's own, one per step."""

    name: Literal["table"] = Field(description=_SCHEDULE)
    values: File = Field(description="a file with one learning rate per training step; they replace the optimizer's lr")


class TrainingSettings(Section):
    """The training run, fully determined."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="seeds the initial weights, the data order and dropout")
    epochs: int = Field(default=2, ge=1, description="passes over the training data")
    batch_size: int = Field(default=50, ge=1, description="examples per optimizer step")
    microbatch_size: int | None = Field(
        default=None, ge=1, description="examples per forward pass; null takes the whole batch at once"
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="of parameters, training and scores")
    mode: Literal["train", "eval"] = Field(
        default="train", description="the module's mode in training steps: train has dropout and batch statistics"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="the largest global gradient norm; null does not clip"
    )
    order: File | None = Field(
        default=None, description="a file with the example indices of every batch; null shuffles each epoch by the seed"
    )
    optimizer: SGDSettings | AdamSettings | AdamWSettings | AdagradSettings | RMSpropSettings | MuonSettings = Field(
        default=AdamWSettings(name="adamw"), discriminator="name", description="the optimizer and its settings"
    )
    schedule: WarmupSchedule | RestartSchedule | PolynomialSchedule | InverseSqrtSchedule | TableSchedule = Field(
        default=WarmupSchedule(name="linear"), discriminator="name", description="the learning-rate schedule"
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _is_precise(cls, dtype: object) -> object:
        if dtype in ("bfloat16", "bf16", "float16", "fp16", "half"):
            raise ValueError("has to be float32 or float64: less rounds away what scores are made of")
        return dtype

    @field_validator("optimizer", mode="before")
    @classmethod
    def _is_smooth(cls, optimizer: object) -> object:
        refuse_what_is_not_smooth(optimizer)
        return optimizer

    @model_validator(mode="after")
    def _microbatch_fits(self) -> TrainingSettings:
        if self.microbatch_size is not None and self.microbatch_size > self.batch_size:
            raise ValueError(f"microbatch_size ({self.microbatch_size}) exceeds batch_size ({self.batch_size})")
        return self


class AttributionSettings(Section):
    """How the walk back through training is carried out. None of it but `unit` changes a score beyond rounding."""

    unit: Literal["example", "token", "document"] = Field(
        default="example",
        description="what gets a score of its own: example; token, each token of each example; document, of packed rows",
    )
    segment_steps: AutoOrCount = Field(
        default="auto", description="training steps per segment; auto takes the square root of the number of steps"
    )
    query_batch: AutoOrCount = Field(default="auto", description="queries that are walked together")
    memory_budget: AutoOrBytes = Field(
        default="auto", description="memory for the walk: a size such as 8GiB, or bytes; auto measures what is free"
    )
    save_every: SegmentOrCount = Field(
        default="segment", description="when a query's walk is sealed: segment, or a number of backward steps"
    )
    threads: AutoOrCount = Field(default="auto", description="CPU threads of torch; another number changes last bits")
    chunk: AutoOrCount = Field(
        default="auto", description="queries per batched pullback call; auto takes the fastest that fits"
    )
    engine: Literal["auto", "eager", "compiled"] = Field(
        default="auto",
        description="how steps are pulled back: eager; compiled by torch.compile (needs a C++ compiler); auto compiles where it pays",
    )
    collective_timeout_minutes: float = Field(
        default=30, gt=0, description="with several processes: how long one waits for another's numbers"
    )
    stall_timeout_minutes: float = Field(
        default=60,
        gt=0,
        description="processes that finish no step for so long are ended, with their stacks in their logs, and started again",
    )
    stop_grace_seconds: float = Field(
        default=300,
        gt=0,
        description="with several processes: how long they may take to seal and end when they are asked to stop",
    )


class QueriesSettings(Section):
    """Where the queries come from: a file, or a split of the task's data. With neither, the task brings its own."""

    file: File | None = Field(
        default=None, description="a JSON Lines file of queries, or its URL such as s3://bucket/queries.jsonl"
    )
    split: File | None = Field(default=None, description="the split of the task's data whose examples are queries")
    count: int | None = Field(default=None, ge=1, description="how many queries of the split; null takes all")
    measurement: str | None = Field(
        default=None,
        min_length=1,
        description="what queries measure, one of the task's by name (such as log_odds); null is its default, the mean loss",
    )
    examples_at_once: int | None = Field(
        default=None, ge=1, description="examples of a query per forward pass; null takes all of a query's at once"
    )

    @model_validator(mode="after")
    def _one_source(self) -> QueriesSettings:
        if self.file is not None and (self.split is not None or self.count is not None):
            raise ValueError("takes either file, or split and count")
        if self.count is not None and self.split is None:
            raise ValueError("count needs a split")
        return self


class LDSSettings(Section):
    """The linear datamodeling score: retraining on random subsets."""

    subsets: int = Field(default=50, ge=2, description="how many random subsets are retrained")
    drop_fraction: Fractions = Field(
        default=(0.05,), description="the fraction of examples that each one drops; a list makes a bank of each"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="draws the subsets")
    keep_models: Literal["auto"] | bool = Field(
        default="auto",
        description="whether retrained parameters are kept, so that later queries need no retraining; auto: below 1 GiB",
    )
    bound: float = Field(default=0.9, ge=-1, le=1, description="Dagster warns of a mean below it")


class RemovalSettings(Section):
    """Removal curves: retraining without a query's most helpful examples, against random removals."""

    counts: Annotated[tuple[Annotated[int, Field(strict=True, ge=1)], ...], Field(strict=False, min_length=1)] = Field(
        default=(5, 20, 50, 100), description="how many examples are left out"
    )
    random: int = Field(default=5, ge=1, description="random removals of each count")
    queries: int | None = Field(default=None, ge=1, description="how many queries, the first ones; null takes all")
    seed: int = Field(default=0, ge=0, lt=2**63, description="draws the random removals")


class SmoothnessSettings(Section):
    """Metasmoothness: whether training answers steadily when data weights move, the condition for scores that predict."""

    h: float = Field(default=0.1, gt=0, le=0.5, description="how far the weights move: by h, and by 2h")
    directions: int = Field(default=1, ge=1, description="random directions of +1 and -1, two trainings each")
    seed: int = Field(default=0, ge=0, lt=2**63, description="draws the directions")


class DerivativeSettings(Section):
    """Whether the scores agree with two trainings whose data weights are moved along a random direction."""

    h: float = Field(default=0.01, gt=0, le=0.1, description="how far the weights move, there and back")
    tolerance: float = Field(default=0.02, gt=0, lt=1, description="the relative error up to which they agree")
    seed: int = Field(default=0, ge=0, lt=2**63, description="draws the direction of +1 and -1")


class ValidationSettings(Section):
    """Checks of the scores against retraining."""

    lds: LDSSettings | None = Field(default=None, description="the linear datamodeling score; null leaves it out")
    removal: RemovalSettings | None = Field(default=None, description="removal curves; null leaves them out")
    smoothness: SmoothnessSettings | None = Field(default=None, description="metasmoothness; null leaves it out")
    derivative: DerivativeSettings | None = Field(
        default=None, description="the scores against two trainings; null leaves it out"
    )
