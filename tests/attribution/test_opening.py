"""What changes the training fingerprint and what does not, and wrong input refused before training with one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.status import trajectory_status
from magic_pipeline.attribution.training import train
from magic_pipeline.errors import InputError
from tests.attribution.running import TASKS, open_small

ORDER = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def small_weights() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    shapes = {"0.weight": (4, 5), "0.bias": (4,), "3.weight": (3, 4), "3.bias": (3,)}
    return {name: generator.standard_normal(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "change",
    [
        {"storage": "elsewhere"},
        {"name": "renamed"},
        {"validation": {"lds": {"subsets": 7}}},
        {"training": {"microbatch_size": 2}},
        {"task": {"type": f"{TASKS}:SmallTask", "query_ids": ["first", "second", "third"]}, "device": "cpu"},
    ]
    + [
        {"attribution": {name: value}}
        for name, value in [
            ("save_every", 3),
            ("segment_steps", 3),
            ("memory_budget", "1GiB"),
            ("threads", 2),
            ("chunk", 1),
            ("query_batch", 1),
        ]
    ],
    ids=str,
)
def test_what_changes_no_number_of_training_is_not_in_the_fingerprint(tmp_path: Path, change: dict[str, Any]) -> None:
    queries = {"type": f"{TASKS}:SmallTask", "query_ids": ["first", "second", "third"]}
    base = {"task": queries} if "task" in change else {}
    assert open_small(tmp_path / "a", **base).fingerprint == open_small(tmp_path / "b", **change).fingerprint


def test_a_comment_in_the_file_is_not_in_the_fingerprint(tmp_path: Path) -> None:
    before = open_small(tmp_path).fingerprint
    file = tmp_path / "small.yaml"
    file.write_text("# a comment\n" + file.read_text())
    assert open_experiment(load_experiment(file)).fingerprint == before


def test_every_number_of_training_is_in_the_fingerprint(tmp_path: Path) -> None:
    np.savez(tmp_path / "init.npz", **small_weights())
    np.savez(tmp_path / "other.npz", **{name: value + 1e-12 for name, value in small_weights().items()})
    (tmp_path / "order.json").write_text(json.dumps(ORDER))
    (tmp_path / "reversed.json").write_text(json.dumps(ORDER[::-1]))
    (tmp_path / "rates.json").write_text("[0.1, 0.1, 0.1]")
    (tmp_path / "faster.json").write_text("[0.1, 0.1, 0.2]")
    adamw = {"name": "adamw", "lr": 0.05, "betas": [0.9, 0.99], "eps_root": 1e-8}
    changes: list[dict[str, Any]] = [
        {},
        {"training": {"seed": 1}},
        {"training": {"dtype": "float32"}},
        {"training": {"mode": "eval"}},
        {"training": {"epochs": 3}},
        {"training": {"clip_norm": 1.0}},
        {"training": {"optimizer": adamw | {"lr": 0.06}}},
        {"training": {"optimizer": adamw | {"eps_root": 1e-7}}},
        {"training": {"optimizer": {"name": "sgd", "lr": 0.05}}},
        {"training": {"schedule": {"name": "cosine"}}},
        {"task": {"type": f"{TASKS}:SmallTask", "data_seed": 1}},
        {"init": "init.npz"},
        {"init": "other.npz"},
        {"training": {"order": "order.json"}},
        {"training": {"order": "reversed.json"}},
        {"training": {"order": "order.json", "schedule": {"name": "table", "values": "rates.json"}}},
        {"training": {"order": "order.json", "schedule": {"name": "table", "values": "faster.json"}}},
    ]
    fingerprints = [open_small(tmp_path, **change).fingerprint for change in changes]
    assert len(set(fingerprints)) == len(changes)


@pytest.mark.parametrize(("middle", "matters"), [("tanh", False), ("dropout", True), ("batch_norm", True)])
def test_the_split_into_micro_batches_is_in_the_fingerprint_where_it_changes_numbers(
    tmp_path: Path, middle: str, matters: bool
) -> None:
    task = {"type": f"{TASKS}:SmallTask", "middle": middle}
    found = {open_small(tmp_path, task=task, training={"microbatch_size": size}).fingerprint for size in (None, 2)}
    assert len(found) == 1 + matters


@pytest.mark.parametrize("suffix", ["json", "npy"])
def test_the_order_file_is_taken_as_it_is(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"order.{suffix}"
    if suffix == "json":
        file.write_text("[[3, 1], [1, 1, 0], [11]]")
        assert open_small(tmp_path, training={"order": file.name}).order == ((3, 1), (1, 1, 0), (11,))
    else:
        np.save(file, np.array(ORDER))
        assert open_small(tmp_path, training={"order": file.name}).order == tuple(map(tuple, ORDER))


def test_a_float64_weight_file_reaches_the_run_unrounded(tmp_path: Path) -> None:
    np.savez(tmp_path / "init.npz", **small_weights())
    opened = open_small(tmp_path, init="init.npz", task={"type": f"{TASKS}:ThreeLayers"})
    for name, value in small_weights().items():
        assert torch.equal(opened.initial_state.params[name], torch.from_numpy(value)), name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0, 12]]", "step 0 names the example 12; expected a whole number from 0 to 11"),
        ("[[0], []]", "step 1 should be a non-empty list of example indices"),
        ("[[0.5]]", "step 0 names the example 0.5"),
        ("[[true]]", "step 0 names the example True"),
        ("[0, 1]", "step 0 should be a non-empty list"),
        ("[]", "should hold one list of example indices per step"),
        ("{", "cannot be read as .json"),
    ],
)
def test_a_wrong_order_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "order.json").write_text(content)
    with pytest.raises(InputError, match=rf"order\.json: training\.order: {message}") as caught:
        open_small(tmp_path, training={"order": "order.json"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rates", ["[0.1, 0.1]", "[0.1, 0.1, 0.1, 0.1]", '["a", 1, 1]', "3", "[0.1, NaN, 0.1]"])
def test_a_wrong_learning_rate_table_is_refused(tmp_path: Path, rates: str) -> None:
    (tmp_path / "order.json").write_text(json.dumps(ORDER))
    (tmp_path / "rates.json").write_text(rates)
    with pytest.raises(InputError, match=r"training\.schedule"):
        open_small(tmp_path, training={"order": "order.json", "schedule": {"name": "table", "values": "rates.json"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight": np.zeros((4, 6))}, r"'0.weight' should have the shape \[4, 5\], found \[4, 6\]"),
        ({"stranger": np.zeros(3)}, "'stranger' is no parameter or buffer of the model"),
        ({"0.bias": None}, "the trainable parameter '0.bias' is missing"),
    ],
)
def test_wrong_initial_weights_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    weights = {name: value for name, value in (small_weights() | change).items() if value is not None}
    np.savez(tmp_path / "init.npz", **weights)
    with pytest.raises(InputError, match=rf"init\.npz: init: {message}"):
        open_small(tmp_path, init="init.npz", task={"type": f"{TASKS}:ThreeLayers"})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("NoQueries", "there are no queries"),
        ("EmptyQuery", "query 'hollow': expected at least one example"),
    ],
)
def test_wrong_queries_are_refused_when_the_experiment_is_opened(tmp_path: Path, task: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_small(tmp_path, task={"type": f"{TASKS}:{task}"})


@pytest.mark.parametrize(("ids", "message"), [(["a", "a"], "'a' is given twice"), (["a", ""], "non-empty string")])
def test_wrong_query_ids_are_refused(tmp_path: Path, ids: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_small(tmp_path, task={"type": f"{TASKS}:SmallTask", "query_ids": ids})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("UnsteadyCollate", "the same examples .* gave two different batches"),
        ("OneLoss", r"example_losses gave \[\] of torch.float64; expected \[rows\]"),
        ("TooManyLosses", r"example_losses gave 8 losses for 4 rows"),
        ("KeptDimension", r"example_losses gave 1 losses for 4 rows"),
        (
            "SinglePrecisionLosses",
            r"example_losses gave \[4\] of torch.float32; expected \[rows\] or \[rows, tokens\] of torch.float64",
        ),
        ("VectorMeasurement", r"query 'first': the measurement gave \[1\]; expected a scalar"),
        ("NotANumberMeasurement", r"query 'second': its measurement of the untrained model is nan"),
    ],
)
def test_a_wrong_task_is_refused_before_the_first_step(tmp_path: Path, task: str, message: str) -> None:
    def no_step(event: object) -> None:
        raise AssertionError(f"training began: {event}")

    opened = open_small(tmp_path, task={"type": f"{TASKS}:{task}"})
    with pytest.raises(InputError, match=message) as caught:
        train(opened, observe=no_step)
    assert "\n" not in str(caught.value)
    assert not trajectory_status(opened).complete


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device: cuda is asked for"):
        open_small(tmp_path, device="cuda")


def test_opening_leaves_the_ambient_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    open_small(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
