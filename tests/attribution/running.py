"""Small experiments written as YAML files, and what these tests do with them again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from magic_pipeline.attribution import ledger
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.observing import Event, Observe, ShouldStop, never, unobserved
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.attribution.scores import read_scores, write_scores
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk

TASKS = "tests.attribution.small_task"
STEPS = 6  # 12 examples, batches of 4, 2 epochs: segments 0, 2, 4, 6
SMALL: Mapping[str, Any] = {
    "name": "small",
    "storage": "store",
    "task": {"type": f"{TASKS}:SmallTask"},
    "training": {
        "epochs": 2,
        "batch_size": 4,
        "dtype": "float64",
        "optimizer": {"name": "adamw", "lr": 0.05, "betas": [0.9, 0.99], "eps_root": 1e-8},
        "schedule": {"name": "linear", "warmup_steps": 1},
    },
    # Threads and chunk decide the last bits; measured ones could differ from run to run.
    "attribution": {"threads": 1, "chunk": 2},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the changes of its nested sections."""
    result = dict(base)
    for name, value in changes.items():
        inner = result.get(name)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping) and "type" not in value and "name" not in value
        result[name] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


def open_small(folder: Path, /, **changes: Any) -> OpenExperiment:
    """The small experiment with changes, written to a file in `folder` and opened from it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(merged(SMALL, changes)))
    return open_experiment(load_experiment(path))


def keys(opened: OpenExperiment) -> list[str]:
    return [query.key for query in opened.queries]


def run(opened: OpenExperiment, *, observe: Observe = unobserved, should_stop: ShouldStop = never) -> Tensor:
    """Trains, walks and writes all queries; their scores [units, queries]."""
    train(opened, observe=observe, should_stop=should_stop)
    walk(opened, keys(opened), observe=observe, should_stop=should_stop)
    return torch.stack([scores(opened, key) for key in keys(opened)], dim=1)


def scores(opened: OpenExperiment, key: str) -> Tensor:
    """A query's scores [units], as its Parquet file holds them."""
    write_scores(opened, key)
    return torch.from_numpy(read_scores(opened, key).scores.copy())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of each query's scores, relative to its largest score; the worst query's."""
    assert found.shape == expected.shape
    off = (found - expected).abs().amax(0) / expected.abs().amax(0)
    return float(off.max())


class CrashError(Exception):
    """Stands for whatever ends a process in the middle of its work."""


def crash_at(n: int, kind: type[Event]) -> Callable[[Event], None]:
    """An observer that raises at the n-th event of this kind, counted from 0."""
    count = itertools.count()

    def observe(event: Event) -> None:
        if isinstance(event, kind) and next(count) == n:
            raise CrashError(f"at {event}")

    return observe


def stop_after(n: int) -> ShouldStop:
    """Says no n times, then yes for ever."""
    count = itertools.count()
    return lambda: next(count) >= n


def walked(opened: OpenExperiment, key: str) -> list[tuple[int, int]]:
    """The (from, to) of every segment of a query's walk that was begun, as the ledger tells them."""
    entries = ledger.entries(opened.store, opened.layout)
    return [(e["queries"][key], e["start"]) for e in entries if e["work"] == "walk" and key in e["queries"]]


def trained(opened: OpenExperiment) -> list[tuple[int, int]]:
    """The (from, to) of every stretch of training that was begun."""
    entries = ledger.entries(opened.store, opened.layout)
    return [(e["start"], e["stop"]) for e in entries if e["work"] == "train"]
