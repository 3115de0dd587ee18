"""What an experiment has cost so far: steps, steps made twice, FLOPs and bytes, from the ledger and the store. No log is read.

A step of a walk counts once for each query that is walked, as in the ledger; the FLOPs that queries share are divided among them. Those
of matrix products and convolutions are counted, in the first training step: a step of a walk takes `2 + 2 Q` times as many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from magic_pipeline.attribution import ledger
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.training import step_flops


@dataclass(frozen=True)
class Cost:
    """One row.

    Attributes:
        what: `training`, a query's id, or `retraining`.
        steps: that its ledger says were begun; a segment that was killed counts whole.
        redone: of those, steps that had been begun before.
        flops: of the steps begun; for retraining that of every model, whole.
        bytes: that it takes in the storage now.
    """

    what: str
    steps: int
    redone: int
    flops: int
    bytes: int


def costs(opened: OpenExperiment) -> tuple[Cost, ...]:
    """Training, every query in the experiment's order, and retraining where there is any."""
    step, stored = step_flops(opened), _stored(opened)
    trained, walked, retrained = list[range](), dict[str, list[range]](), Counter[str]()
    shared: dict[str, float] = defaultdict(float)
    for entry in ledger.entries(opened.store, opened.layout):
        if entry["work"] == "train":
            trained.append(range(entry["start"], entry["stop"]))
        elif entry["work"] == "walk":
            _note_walk(entry["start"], entry["queries"], walked, shared)
        elif entry["work"] == "retrain":
            retrained["steps"] += (opened.steps - entry["start"]) * len(entry["retrainings"])
    rows = [_cost("training", trained, step * sum(map(len, trained)), stored["trajectory"])]
    for query in opened.queries:
        begun = walked.get(query.key, [])
        rows.append(_cost(query.id, begun, round(step * shared[query.key]), stored[query.key]))
    if retrained["steps"]:
        # A killed block goes on from its last seal: what was begun twice is not told by where it was begun.
        rows.append(Cost("retraining", retrained["steps"], 0, step * retrained["steps"], stored["validation"]))
    return tuple(rows)


def _note_walk(
    start: int, queries: Mapping[str, int], walked: dict[str, list[range]], shared: dict[str, float]
) -> None:
    """A segment: queries that joined further along make fewer steps of it. `shared` is in training steps."""
    for key, stop in queries.items():
        walked.setdefault(key, []).append(range(start, stop))
        together = sum(1 for other in queries.values() if other >= stop)
        shared[key] += (stop - start) * (2 + 2 / together)


def _cost(what: str, begun: list[range], flops: int, size: int) -> Cost:
    times = Counter(step for piece in begun for step in piece)
    return Cost(what, times.total(), times.total() - len(times), flops, size)


def _stored(opened: OpenExperiment) -> Counter[str]:
    """Bytes below the training's folder: of the trajectory, of each query key with its scores, and of validation."""
    sizes: Counter[str] = Counter()
    for found in opened.store.tree(opened.layout.root):
        parts = found.path.removeprefix(f"{opened.layout.root}/").split("/")
        sizes[parts[1] if parts[0] == "queries" and len(parts) > 1 else parts[0]] += found.size
    return sizes
