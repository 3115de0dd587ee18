"""What the store, the ledger and Dagster's books hold of an experiment, as plain data that two processes can compare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magic_pipeline.attribution import ledger
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.attribution.scores import read_scores
from magic_pipeline.attribution.status import query_statuses, stored_status, trajectory_status
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.orchestration.event_log_view import view_event_log
from magic_pipeline.orchestration.instance import open_instance


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


def look(path: Path) -> Found:
    """How far everything is."""
    opened = open_experiment(load_experiment(path))
    steps = [name.step for name in opened.trajectory_chain.sealed()]
    trained = opened.steps + 1 if trajectory_status(opened).complete else max(steps, default=0)
    return Found(opened.steps, trained, _walked(opened), list(ledger.entries(opened.store, opened.layout)))


def _walked(opened: OpenExperiment) -> dict[str, int]:
    return {
        query.key: -1 if query.complete else opened.steps if query.step is None else query.step
        for query in query_statuses(opened)
    }


def score_bits(path: Path) -> dict[str, str]:
    """query -> sha256 of its scores' bytes, as the sealed Parquet file gives them."""
    opened = open_experiment(load_experiment(path))
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


def books(path: Path) -> list[str]:
    """What is wrong in Dagster's books or in the store once everything is finished; nothing where all is well."""
    experiment = load_experiment(path)
    [stored] = stored_status(experiment)
    with open_instance(experiment.folder) as instance:
        view = view_event_log(instance, experiment, stored)
        wrong = [*view.differences, *(f"run {run} is not finished" for run in view.unfinished_runs)]
        queries = len(stored.queries)
        expected = {"training_trajectory": 1, "segment_checkpoints": queries, "attribution_scores": queries}
        if view.materialized != {**expected, "score_matrix": 1}:
            wrong.append(f"materialized: {view.materialized}")
    wrong += [f"{query.key} is not finished" for query in stored.queries if query.scores_digest is None]
    findings = verify_experiment(open_experiment(experiment)).findings
    # A killed writer may leave what nothing names; that takes space and is no fault.
    return wrong + [f"{f.object}: {f.problem}" for f in findings if not f.problem.startswith("orphaned")]
