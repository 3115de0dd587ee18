"""The facts that every sealed object of an experiment carries, and that a reader expects. No torch."""

from __future__ import annotations

from typing import Any


def of_training(fingerprint: str) -> dict[str, Any]:
    """What makes a checkpoint one of this training."""
    return {"training": fingerprint}


def of_walk(fingerprint: str, query_digest: str, trajectory_digest: str) -> dict[str, Any]:
    """What makes a checkpoint one of this query's walk over this very trajectory."""
    return {"training": fingerprint, "query": query_digest, "trajectory": trajectory_digest}
