"""Another implementation's scores, reproduced from an experiment file with its own weights, batch order and learning rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import open_experiment
from tests.attribution.running import run
from tests.reference.oracle import FOLDER, NAMES


def optimizer_of(settings: dict[str, Any]) -> dict[str, Any]:
    if settings["optimizer"] == "sgd":
        return {"name": "sgd", "momentum": settings["momentum"], "weight_decay": settings["weight_decay"]}
    betas = [settings["beta1"], settings["beta2"]]
    names = ("eps", "eps_root", "weight_decay")
    return {"name": "adamw", "betas": betas} | {name: settings[name] for name in names}


def write_experiment(folder: Path, name: str) -> Path:
    """The stored run as files that any user could bring: init.npz, order.npy, rates.json, and the experiment file."""
    with np.load(FOLDER / f"{name}.npz") as stored:
        settings = json.loads(str(stored["meta"]))
        steps, rows = stored["tokens"].shape[:2]
        weights = {key.removeprefix("init/"): stored[key] for key in stored.files if key.startswith("init/")}
        np.savez(folder / "init.npz", **weights)
    np.save(folder / "order.npy", np.arange(steps * rows).reshape(steps, rows))
    (folder / "rates.json").write_text(json.dumps(settings["lr_per_step"]))
    experiment = {
        "name": "oracle",
        "storage": "store",
        "task": {"type": "tests.attribution.oracle_task:OracleTask", "file": str(FOLDER / f"{name}.npz")},
        "init": "init.npz",
        "training": {
            "dtype": "float64",
            "mode": "eval",
            "order": "order.npy",
            "optimizer": optimizer_of(settings),
            "schedule": {"name": "table", "values": "rates.json"},
        },
        "attribution": {"threads": 1},
    }
    path = folder / "oracle.yaml"
    path.write_text(yaml.safe_dump(experiment))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_file_reproduces_another_implementations_scores(tmp_path: Path, name: str) -> None:
    opened = open_experiment(load_experiment(write_experiment(tmp_path, name)))
    found = run(opened)
    with np.load(FOLDER / f"{name}.npz") as stored:
        expected = torch.from_numpy(stored["scores"])
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()
