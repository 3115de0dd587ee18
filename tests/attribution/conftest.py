"""A folder for an experiment, and the scores of runs that nothing disturbed."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from magic_pipeline.attribution.training import train
from tests.attribution.running import open_small, run
from tests.servers.s3_server import S3Server
from tests.servers.seaweedfs import weed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensor]:
    """`undisturbed(**changes)`: the scores [units, queries] of the small experiment with these changes, run in one go."""
    known: dict[str, Tensor] = {}

    def of(**changes: Any) -> Tensor:
        name = json.dumps(changes, sort_keys=True)
        if name not in known:
            known[name] = run(open_small(tmp_path_factory.mktemp("undisturbed"), **changes))
        return known[name]

    return of


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power cuts are the business of tests/checkpoints; thousands of fsyncs on a busy disk take minutes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(open_small(folder))
    return folder


@pytest.fixture
def trained_folder(_trained: Path, tmp_path: Path) -> Path:
    """A folder of its own, in whose store the small experiment's training is finished."""
    return Path(shutil.copytree(_trained, tmp_path / "trained"))


@pytest.fixture(params=["local", "memory", "s3"])
def any_storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Changes of an experiment file that put it on each kind of storage; S3 is SeaweedFS where it is installed, else moto."""
    if request.param == "local":
        return {"storage": "store"}
    if request.param == "memory":
        return {"storage": f"memory://{uuid.uuid4().hex}"}
    server: S3Server = request.getfixturevalue("moto_s3" if weed() is None else "seaweedfs")
    return {"storage": server.bucket_url(), "storage_options": dict(server.options)}
