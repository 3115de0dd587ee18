"""The ledger: one create-only object before each segment of work, never changed and never removed by a run.

It is how work done twice can be counted afterwards, whatever was killed in between.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from magic_pipeline.attribution.layout import Layout
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import DamagedObjectError, MissingObjectError

logger = logging.getLogger("magic_pipeline.attribution")


def record_training(store: Store, layout: Layout, start: int, stop: int) -> None:
    """Training is about to make the steps from `start` to `stop`."""
    _record(store, layout, {"work": "train", "start": start, "stop": stop})


def record_walk(store: Store, layout: Layout, start: int, queries: Mapping[str, int]) -> None:
    """A walk is about to go back to step `start`; `queries` gives each query's key and the step that it goes on from."""
    _record(store, layout, {"work": "walk", "start": start, "queries": dict(queries)})


def record_retraining(store: Store, layout: Layout, bank: str, labels: Sequence[str], start: int) -> None:
    """A bank's retrainings are about to be made together, from step `start`."""
    _record(store, layout, {"work": "retrain", "bank": bank, "retrainings": list(labels), "start": start})


def entries(store: Store, layout: Layout) -> Iterator[dict[str, Any]]:
    """All entries in the order in which they were written (to the clock of their machines); a damaged one is warned about."""
    for name in store.list(layout.ledger):
        try:
            yield store.read_json(f"{layout.ledger}/{name}")
        except (DamagedObjectError, MissingObjectError) as error:
            logger.warning("%s/%s/%s is not counted: %s", store.url, layout.ledger, name, error)


def most_redone(store: Store, layout: Layout, resume: Mapping[str, int]) -> int:
    """At most how many steps a walk that goes on at `resume` (key -> step) makes again: those of segments begun and not sealed."""
    lowest = dict(resume)
    for entry in entries(store, layout):
        for key in entry.get("queries", {}).keys() & lowest.keys():
            lowest[key] = min(lowest[key], entry["start"])
    return max((step - lowest[key] for key, step in resume.items()), default=0)


def most_retrained(store: Store, layout: Layout, resume: int) -> int:
    """At most how many steps a training that goes on at step `resume` makes again."""
    begun = (entry["stop"] for entry in entries(store, layout) if entry["work"] == "train")
    return max(0, max(begun, default=resume) - resume)


def _record(store: Store, layout: Layout, content: dict[str, Any]) -> None:
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
    store.create_json(f"{layout.ledger}/{name}", content | {"host": socket.gethostname(), "pid": os.getpid()})
