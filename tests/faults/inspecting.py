"""What the store and the ledger hold of an experiment, as plain data that two processes can compare."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magic_pipeline.attribution import ledger
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import read_scores
from magic_pipeline.attribution.status import query_statuses, trajectory_status


@dataclass(frozen=True)
class Found:
    """A look at an experiment.

    Attributes:
        trained: the highest sealed step of training; the last one and 1 more when it is complete.
        walked: query -> the lowest sealed step, the number of steps where nothing is sealed, -1 when it is complete.
        ledger: entries (work, start, and stop or the queries' steps) in order.
    """

    steps: int
    trained: int
    walked: dict[str, int]
    ledger: list[dict[str, Any]]


def look(opened: OpenExperiment) -> Found:
    """How far everything is."""
    steps = [name.step for name in opened.trajectory_chain.sealed()]
    trained = opened.steps + 1 if trajectory_status(opened).complete else max(steps, default=0)
    return Found(opened.steps, trained, _walked(opened), list(ledger.entries(opened.store, opened.layout)))


def _walked(opened: OpenExperiment) -> dict[str, int]:
    return {
        query.key: -1 if query.complete else opened.steps if query.step is None else query.step
        for query in query_statuses(opened)
    }


def score_bits(opened: OpenExperiment) -> dict[str, str]:
    """query -> sha256 of its scores' bytes, as the sealed Parquet file gives them."""
    return {q.key: hashlib.sha256(read_scores(opened, q.key).scores.tobytes()).hexdigest() for q in opened.queries}


def repeated_work(before: Found, after: Found) -> list[str]:
    """Sealed work that was done again: `before` is the look after the fault, `after` the one after the rerun."""
    wrong = []
    new = after.ledger[len(before.ledger) :]
    trained = before.trained
    for entry in (entry for entry in new if entry["work"] == "train"):
        if entry["start"] != trained:
            wrong.append(f"training went on from step {entry['start']}, not {trained}")
        trained = entry["stop"]
    reached = dict(before.walked)
    for entry in (entry for entry in new if entry["work"] == "walk"):
        for key, step in entry["queries"].items():
            if step != reached[key]:
                wrong.append(f"the walk of {key} went on from step {step}, not {reached[key]}")
            reached[key] = entry["start"]
    return wrong


def begun_again(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of training and of each query: how many segments the ledger says were begun a second time (or third, ...)."""
    begun: dict[str, Counter[tuple[int, int]]] = {}
    for entry in entries:
        if entry["work"] == "train":
            begun.setdefault("training", Counter())[entry["start"], entry["stop"]] += 1
        for key, stop in entry.get("queries", {}).items():
            begun.setdefault(key, Counter())[entry["start"], stop] += 1
    return {work: segments.total() - len(segments) for work, segments in begun.items()}


def census(opened: OpenExperiment) -> dict[str, int]:
    """How many objects there are of each name, without what is drawn at random or counts the writers and their attempts."""
    found = Counter(named(one.path) for one in opened.store.tree(opened.folder))
    found.update(f"{named(one.path)}, unfinished" for one in opened.store.sink.unfinished_tree(opened.folder))
    return {
        name: count for name, count in sorted(found.items()) if not re.search(r"(^|/)(ledger|epochs)/\*[^,]*$", name)
    }


def named(path: str) -> str:
    """An object's path below its training's folder, with * for what differs from run to run."""
    below = path.split("/", 2)[-1]
    below = re.sub(r"(?<=/epochs/)\d{8}|(?<=\.e)\d{8}(?=\.json)|(?<=/e)\d{8}(?=-)", "*", below)
    below = re.sub(r"(?<=[/-])[0-9a-f]{16,32}(?=\.(pt|parquet|json)$)", "*", below)
    below = re.sub(r"(?<=ledger/)[0-9a-f-]+", "*", below)
    return re.sub(r"(?<=queries/)([^/]+)/[0-9a-f]{32}", r"\1", below)
