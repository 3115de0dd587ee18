"""Which examples every training step takes: one function for training, replay and retraining, so that they cannot differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.errors import InputError

Order = tuple[tuple[int, ...], ...]


def batch_order(experiment: Experiment, examples: int) -> Order:
    """The example indices of every step's batch.

    By default each epoch is a fresh shuffle under the experiment's seed, cut into batches; the last one may be smaller. With
    `training.order` the file's batches are taken as they are, and `epochs` and `batch_size` do not count.

    Raises:
        InputError: the file is not a list of non-empty lists of indices into the data.
    """
    training = experiment.training
    if training.order is not None:
        return _read_order(experiment.resolve(training.order), examples)
    generator = torch.Generator().manual_seed(training.seed)
    batches: list[tuple[int, ...]] = []
    for _ in range(training.epochs):
        shuffled = torch.randperm(examples, generator=generator).tolist()
        batches += [tuple(shuffled[at : at + training.batch_size]) for at in range(0, examples, training.batch_size)]
    return tuple(batches)


def read_numbers(file: Path, field: str) -> Any:
    """The content of a `.json` or `.npy` file of numbers, as nested lists.

    Raises:
        InputError: the file has another ending or cannot be read.
    """
    try:
        if file.suffix == ".json":
            return json.loads(file.read_text(encoding="utf-8"))
        if file.suffix == ".npy":
            return np.load(file, allow_pickle=False).tolist()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read as {file.suffix}: {error}", file=file, field=field) from error
    raise InputError(f"should be a .json or .npy file, found {file.suffix or 'no ending'}", file=file, field=field)


def _read_order(file: Path, examples: int) -> Order:
    content = read_numbers(file, "training.order")
    if not isinstance(content, list) or not content:
        raise _wrong(file, "should hold one list of example indices per step")
    return tuple(_checked_batch(file, step, batch, examples) for step, batch in enumerate(content))


def _checked_batch(file: Path, step: int, batch: Any, examples: int) -> tuple[int, ...]:
    if not isinstance(batch, Sequence) or isinstance(batch, str) or not batch:
        raise _wrong(file, f"step {step} should be a non-empty list of example indices, found {batch!r}")
    for index in batch:
        if type(index) is not int or not 0 <= index < examples:
            raise _wrong(
                file, f"step {step} names the example {index!r}; expected a whole number from 0 to {examples - 1}"
            )
    return tuple(batch)


def _wrong(file: Path, message: str) -> InputError:
    return InputError(message, file=file, field="training.order")
