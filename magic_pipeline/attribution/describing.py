"""Readable objects at the root of a training fingerprint's folder: what the fingerprint was made from, and the queries."""

from __future__ import annotations

import logging
import time
from typing import Any

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.errors import DamagedObjectError, MissingObjectError

logger = logging.getLogger("magic_pipeline.attribution")


def describe(opened: OpenExperiment) -> None:
    """Writes experiment.json once and queries.json whenever the queries changed; a damaged one is warned about and written again."""
    if _read(opened, opened.layout.description) is None:
        opened.store.replace_json(opened.layout.description, _description(opened))
    queries = {"queries": [{"id": q.id, "key": q.key, "digest": q.digest} for q in opened.queries]}
    if _read(opened, opened.layout.queries) != queries:
        opened.store.replace_json(opened.layout.queries, queries)


def _description(opened: OpenExperiment) -> dict[str, Any]:
    return {
        "experiment": opened.experiment.name,
        "fingerprint": opened.fingerprint,
        "made_from": dict(opened.facts),
        "settings": opened.experiment.model_dump(mode="json"),
        "steps": opened.steps,
        "examples": len(opened.dataset),
        "units": len(opened.units),
        "created_unix": time.time(),
    }


def _read(opened: OpenExperiment, path: str) -> dict[str, Any] | None:
    try:
        return opened.store.read_json(path)
    except MissingObjectError:
        return None
    except DamagedObjectError as error:
        logger.warning("%s/%s is written again: %s", opened.store.url, path, error)
        return None
