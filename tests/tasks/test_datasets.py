"""Digests tell data apart, and are the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.datasets import InMemoryDataset, content_digest


@dataclass
class Pair:
    left: object
    right: object


# No two of these are the same data, though many look alike.
DIFFERENT: list[Any] = [
    None,
    "None",
    0,
    False,
    0.0,
    -0.0,
    "0",
    b"0",
    "",
    b"",
    [],
    (),
    {},
    [[]],
    [[], []],
    ["a", "b"],
    ["ab"],
    ["b", "a"],
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    {"a": ["b", 1]},
    [b"", b"bytes"],
    [b"bytes", b""],
    Pair(1, 2),
    Pair(2, 1),
    torch.zeros(2),
    torch.zeros(2, dtype=torch.float64),
    torch.zeros(2, 1),
    torch.zeros(1, 2),
    torch.zeros(8, dtype=torch.uint8),
    torch.tensor(0.0),
    np.zeros(2, dtype=np.float32),
    np.float32(0),
]


def test_different_data_have_different_digests() -> None:
    for (i, left), (j, right) in combinations(enumerate(map(content_digest, DIFFERENT)), 2):
        assert left != right, (DIFFERENT[i], DIFFERENT[j])


def test_memory_layout_and_the_order_of_a_dict_are_not_content() -> None:
    assert content_digest(torch.arange(6).view(2, 3).t()) == content_digest(torch.arange(6).view(2, 3).t().contiguous())
    assert content_digest(np.arange(6).reshape(2, 3).T) == content_digest(
        np.ascontiguousarray(np.arange(6).reshape(2, 3).T)
    )
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([object()]), [lambda: None]])
def test_what_has_no_telling_content_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="cannot digest"):
        content_digest(value)


def test_a_datasets_digest_covers_ids_examples_and_order() -> None:
    digests = {
        InMemoryDataset(examples, ids).digest
        for examples, ids in [([1, 2], ["a", "b"]), ([2, 1], ["a", "b"]), ([1, 2], ["b", "a"]), ([2, 1], ["b", "a"])]
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("examples", "ids", "message"),
    [
        ([], [], "at least one training example"),
        ([1], ["a", "b"], "found 1 examples but 2 ids"),
        ([1, 2], ["a", ""], "example 1: expected a non-empty string as id, found ''"),
        ([1, 2], ["a", 3], "example 1: expected a non-empty string as id, found 3"),
    ],
)
def test_a_dataset_without_proper_ids_is_refused(examples: list[int], ids: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        InMemoryDataset(examples, ids)


DESCRIBE = """
from pathlib import Path
from magic_pipeline.tasks.protocol import load_task

def described(name, settings):
    data = load_task(name, settings, folder=Path(), queries=None).training_data()
    return [name, len(data), data.digest, *data.ids[:3]]

result = [
    described("digits_classifier", {}),
    described("linear_regression", {}),
    described("causal_lm_text", {"modules": ["json/*", "urllib/*"], "documents": 20}),
]
"""


def test_data_are_the_same_in_every_process() -> None:
    here: dict[str, Any] = {}
    exec(DESCRIBE, here)
    there = subprocess.run(
        [sys.executable, "-c", f"{DESCRIBE}\nimport json; print(json.dumps(result))"],
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert json.loads(there) == here["result"]
    assert [row[1] for row in here["result"]] == [1500, 32, 20]
