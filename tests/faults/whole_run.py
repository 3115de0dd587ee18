"""A complete small experiment in this process, without Dagster: training, walk, score sheets, matrix.

8 steps in 4 segments, two queries in one cohort: each is sealed three times, so that the oldest checkpoint is retired once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import write_score_matrix, write_scores
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from tests.attribution.running import TASKS, keys, open_small
from tests.servers.moto import running_moto
from tests.servers.s3_server import S3Server
from tests.servers.seaweedfs import running_seaweedfs

EXPERIMENT: Mapping[str, Any] = {
    "task": {"type": f"{TASKS}:SmallTask", "query_ids": ["first", "second"]},
    "training": {"batch_size": 3},
    "attribution": {"segment_steps": 2},
}


@dataclass(frozen=True)
class Place:
    """A kind of storage. `server` is None for a folder on this machine."""

    name: str
    server: S3Server | None = None

    @property
    def saves_beside(self) -> bool:
        """Whether saves are made while compute goes on, so that one more segment is at stake."""
        return self.server is not None

    def new(self) -> dict[str, Any]:
        """Settings of a storage of its own, below the experiment's folder or in the bucket."""
        if self.server is None:
            return {"storage": uuid.uuid4().hex}
        return {"storage": self.server.bucket_url(), "storage_options": dict(self.server.options)}


@contextmanager
def place(name: str, folder: Path) -> Iterator[Place]:
    """local, moto or seaweedfs; a server ends with the context.

    Raises: FileNotFoundError when SeaweedFS is not installed.
    """
    if name == "local":
        yield Place(name)
    elif name == "moto":
        with running_moto() as server:
            yield Place(name, server)
    else:
        with running_seaweedfs(folder) as server:
            yield Place(name, server)


def open_at(folder: Path, storage: Mapping[str, Any]) -> OpenExperiment:
    """The experiment, its file in `folder`, its storage as the settings say."""
    return open_small(folder, **EXPERIMENT, **storage)


def whole_run(opened: OpenExperiment) -> None:
    """Everything, as far as it is not done."""
    train(opened)
    walk(opened, keys(opened))
    for key in keys(opened):
        write_scores(opened, key)
    write_score_matrix(opened)
