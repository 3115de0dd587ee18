"""Readable objects at the root of a training fingerprint's folder: what the fingerprint was made from, and the queries."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.errors import DamagedObjectError, MissingObjectError, ObjectExistsError


def describe(opened: OpenExperiment) -> None:
    """Writes experiment.json once and queries.json whenever the queries changed."""
    with contextlib.suppress(ObjectExistsError):
        opened.store.create_json(
            opened.layout.description,
            {
                "experiment": opened.experiment.name,
                "fingerprint": opened.fingerprint,
                "made_from": dict(opened.facts),
                "settings": opened.experiment.model_dump(mode="json"),
                "steps": opened.steps,
                "examples": len(opened.dataset),
                "units": len(opened.units),
                "created_unix": time.time(),
            },
        )
    content = {"queries": [{"id": q.id, "key": q.key, "digest": q.digest} for q in opened.queries]}
    if _current(opened) != content:
        opened.store.replace_json(opened.layout.queries, content)


def _current(opened: OpenExperiment) -> dict[str, Any] | None:
    try:
        return opened.store.read_json(opened.layout.queries)
    except (MissingObjectError, DamagedObjectError):
        return None
