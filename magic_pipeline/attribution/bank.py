"""A bank: retrainings of one training run, which differ in the weights of some units and in nothing else. No torch.

What a bank is made of (which units, which weights) is decided here, and hashed into its *validation fingerprint* together with the
training fingerprint. So other subset settings make another bank beside the first, and never retrain the model itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magic_pipeline.checkpoints.digests import fingerprint
from magic_pipeline.errors import InputError

SCHEMA = 1

Rows = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reweighting:
    """One retraining: the units at `rows` (ascending, each once) have the weights `values`, all others 1."""

    label: str
    rows: Rows
    values: Values

    @classmethod
    def dropping(cls, label: str, rows: Iterable[int]) -> Reweighting:
        """Without these units."""
        ordered = np.unique(np.fromiter(rows, dtype=np.int64))
        return cls(label, ordered, np.zeros(len(ordered)))

    @cached_property
    def digest(self) -> str:
        """Of the weights; two retrainings of one digest are the same retraining."""
        content = hashlib.sha256(np.ascontiguousarray(self.rows, dtype="<i8").tobytes())
        content.update(np.ascontiguousarray(self.values, dtype="<f8").tobytes())
        return content.hexdigest()[:32]

    def predicted_change(self, scores: NDArray[np.floating[Any]]) -> Values:
        """`sum_i (w_i - 1) * score_i` in float64, the change that the scores promise; `scores` is `[units]` or `[units, queries]`."""
        change: Values = (self.values - 1) @ scores[self.rows].astype(np.float64)
        return change


@dataclass(frozen=True, eq=False)
class Bank:
    """Retrainings of one kind.

    Attributes:
        kind: `subsets`, `removal`, `smoothness` or `derivative`.
        training: the training fingerprint.
        settings: what the file says about it, as plain data.
        runs: with distinct labels.
    """

    kind: str
    training: str
    settings: Mapping[str, Any]
    runs: tuple[Reweighting, ...]

    @cached_property
    def fingerprint(self) -> str:
        """The validation fingerprint: training + kind + settings + the weights themselves.

        The weights are in it, so that a generator that draws differently in another version makes another bank.
        """
        runs = [[run.label, run.digest] for run in self.runs]
        content = {"schema": SCHEMA, "training": self.training, "kind": self.kind, "settings": dict(self.settings)}
        return fingerprint(content | {"runs": runs})

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(run.label for run in self.runs)

    def run(self, label: str) -> Reweighting:
        """Raises InputError: the bank has no such retraining."""
        for run in self.runs:
            if run.label == label:
                return run
        raise InputError(f"the bank of {self.kind} {self.fingerprint[:12]} has no retraining {label!r}")


def subset_labels(fraction: float, subsets: int) -> list[str]:
    """The names of a bank's random subsets, which are partition keys too.

    >>> subset_labels(0.05, 2)
    ['0.05-000', '0.05-001']
    """
    return [f"{fraction:g}-{index:03d}" for index in range(subsets)]


def random_subsets(training: str, units: int, *, fraction: float, subsets: int, seed: int) -> Bank:
    """Random sets of `fraction` of the units, left out; all different, the same for the same arguments.

    Raises:
        InputError: there are not so many different sets, or nothing would be left to train on.
    """
    dropped = max(1, round(fraction * units))
    field = "validation.lds.drop_fraction"
    if dropped >= units:
        raise InputError(f"dropping {fraction:g} of {units} units leaves nothing to train on", field=field)
    if comb(units, dropped) < subsets:
        raise InputError(f"there are only {comb(units, dropped)} ways to drop {dropped} of {units} units", field=field)
    settings = {"drop_fraction": fraction, "subsets": subsets, "seed": seed, "units": units}
    generator = np.random.default_rng([seed, dropped, units])
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < subsets:
        drawn.setdefault(tuple(sorted(generator.choice(units, dropped, replace=False).tolist())))
    labels = subset_labels(fraction, subsets)
    runs = (Reweighting.dropping(label, rows) for label, rows in zip(labels, drawn, strict=True))
    return Bank("subsets", training, settings, tuple(runs))


def blocks_of(labels: Sequence[str], width: int) -> list[tuple[str, ...]]:
    """The retrainings in blocks of at most `width`, in order: what is trained at once and sealed as one."""
    return [tuple(labels[at : at + width]) for at in range(0, len(labels), width)]
