"""What status, plan, verify, leave-one-out and the exports say of a run, against counts made by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from torch import Tensor

from magic_pipeline.attribution.exporting import export_scores
from magic_pipeline.attribution.leave_one_out import influential_and_random, leave_one_out
from magic_pipeline.attribution.planning import plan_experiment
from magic_pipeline.attribution.score_matrix import MatrixFormat
from magic_pipeline.attribution.scores import read_scores, write_score_matrix, write_scores
from magic_pipeline.attribution.status import matrix_digest, query_statuses, stored_status, trajectory_status
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InputError, InterruptedWalkError
from tests.attribution.running import TASKS, keys, open_small, run, stop_after

Undisturbed = Callable[..., Tensor]
AWKWARD = [
    "a|b",
    "../x",
    "q...1",
    "é",
    "x" * 300,
    "Same",
    "same",
    "two words\nand a line",
    "=1+1",
    '"quoted", with comma',
]


def test_awkward_query_ids_work_end_to_end_and_come_back_unchanged(tmp_path: Path) -> None:
    task = {"type": f"{TASKS}:SmallTask", "query_ids": AWKWARD}
    opened = open_small(tmp_path, task=task, attribution={"save_every": 6})
    expected = run(opened)
    formats: tuple[MatrixFormat, ...] = ("parquet", "csv", "npz")
    files = {name: tmp_path / f"scores.{name}" for name in formats}
    for name in formats:
        export_scores(opened, format=name, output=files[name])
    with files["csv"].open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    with np.load(files["npz"]) as stored:
        found = {"npz": stored["query_ids"].tolist()}
        assert (stored["scores"] == expected.numpy()).all()
    found["csv"] = list(dict.fromkeys(row["query"] for row in rows))
    found["parquet"] = pq.read_table(files["parquet"]).column("query").unique().to_pylist()
    assert found == dict.fromkeys(formats, AWKWARD)
    assert [float(row["score"]) for row in rows] == expected.T.flatten().tolist()
    assert [query.id for query in query_statuses(opened)] == AWKWARD
    # No id reaches the file system as it is.
    names = [path.name for path in (tmp_path / "store").rglob("*")]
    assert all(len(name) < 100 and name.isascii() for name in names)


def test_status_counts_what_is_sealed(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    assert (trajectory_status(opened).complete, trajectory_status(opened).segments) == (False, 0)
    with pytest.raises(InterruptedWalkError):
        train(opened, should_stop=stop_after(4))
    status = trajectory_status(opened)
    assert (status.complete, status.segments, status.sealed, status.steps) == (False, 3, 2, 6)
    train(opened)
    status = trajectory_status(opened)
    assert (status.complete, status.segments, status.sealed, status.boundaries) == (True, 3, 3, (0, 2, 4, 6))
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened)[:1], should_stop=stop_after(5))
    walk(opened, keys(opened)[1:2])
    first, second, third = query_statuses(opened)
    assert [(q.complete, q.sealed, q.segments, q.step) for q in (first, second, third)] == [
        (False, 2, 3, 2),
        (True, 3, 3, 0),
        (False, 0, 3, None),
    ]
    assert (second.walk_digest is not None, second.scores_digest, matrix_digest(opened)) == (True, None, None)
    write_scores(opened, second.key)
    assert query_statuses(opened, [second.key])[0].scores_digest is not None
    sheet = write_score_matrix(opened)
    assert (sheet.rows, sheet.columns, matrix_digest(opened)) == (12, 1, sheet.digest)
    [stored] = stored_status(opened.experiment)
    assert stored.trajectory == trajectory_status(opened)
    assert stored.queries == query_statuses(opened)
    walk(opened, keys(opened))
    # A matrix of fewer queries than are finished is none of the experiment.
    assert matrix_digest(opened) is None


def test_a_plan_counts_steps_segments_and_bytes_and_writes_nothing(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    plan = plan_experiment(opened)
    assert not (tmp_path / "store").exists()
    parameters = 5 * 4 + 4 + 4 * 3 + 3
    state = 3 * parameters * 8
    assert (plan.steps, plan.segments, plan.parameters, plan.examples, plan.units) == (6, 3, parameters, 12, 12)
    assert (plan.queries, plan.queries_finished, plan.cohorts, plan.lanes, plan.hold) == (3, 0, 1, 3, None)
    assert (plan.trajectory_bytes, plan.checkpoint_bytes) == (4 * state, state + 12 * 8)
    # Matrix products: 2 x 4 rows x weights forward; backward the same for the weights, and for the second layer's inputs.
    flops = 2 * 4 * (20 + 12) * 2 + 2 * 4 * 12
    assert plan.training_flops == 6 * flops
    assert plan.walk_flops == 6 * flops * (2 + 2 * 3)
    assert plan.training_seconds > 0 and plan.walk_seconds > 0
    assert json.loads(json.dumps(plan.as_dict()))["steps"] == 6
    train(opened)
    walk(opened, keys(opened)[:2])
    plan = plan_experiment(opened)
    assert (plan.training_complete, plan.training_seconds, plan.queries_finished, plan.lanes) == (True, 0.0, 2, 1)
    walk(opened, keys(opened))
    plan = plan_experiment(opened)
    assert (plan.walk_flops, plan.walk_seconds, plan.cohorts) == (0, 0.0, 0)
    assert not any(line.startswith("at risk") for line in plan.lines())


def test_a_plan_splits_segments_only_where_they_do_not_fit(tmp_path: Path) -> None:
    """A budget that holds a segment of 2 steps does not split it, however many steps the run has."""
    tight = {"segment_steps": 2, "memory_budget": 100}
    opened = open_small(tmp_path, training={"batch_size": 1}, attribution=tight)
    with pytest.raises(InputError, match="about") as few:
        plan_experiment(opened)
    needed = int(str(few.value).split("about ")[1].split(" ")[0])
    room = {"segment_steps": 2, "memory_budget": 2 * needed, "query_batch": 1, "chunk": 1}
    plan = plan_experiment(open_small(tmp_path, training={"batch_size": 1}, attribution=room))
    assert plan.hold is None
    assert plan.peak_memory_bytes <= plan.memory_budget_bytes


def test_verify_finds_nothing_in_a_whole_run_and_reads_all_of_it(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    run(opened)
    write_score_matrix(opened)
    found = verify_experiment(opened)
    assert found.findings == ()
    # Two descriptions, 3 + 3 ledger entries, 3 plans, 4 states and their end, 3 finished walks, 3 sheets, the matrix.
    assert found.checked == 2 + 6 + 3 + 5 + 3 + 3 + 1
    blobs = [path for path in (tmp_path / "store").rglob("*") if path.parent.name == "blobs"]
    assert found.bytes == sum(path.stat().st_size for path in blobs)


def test_verify_names_every_damaged_object_and_what_it_costs(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    run(opened)
    write_score_matrix(opened)
    root = tmp_path / "store"
    victims = [
        next(root.rglob("trajectory/blobs/*.pt")),
        next(root.rglob("queries/*/*/complete.*.json")),
        next(root.rglob("plans/*.json")),
        next(root.rglob("scores/blobs/*.parquet")),
        next(root.rglob("ledger/*.json")),
        next(root.rglob("queries.json")),
    ]
    for victim in victims:
        victim.write_bytes(victim.read_bytes()[:-1])
    findings = verify_experiment(opened).findings
    for victim in victims:
        name = str(victim.relative_to(root))
        [finding] = [f for f in findings if name in f.object + f.problem and not f.problem.startswith("orphaned")]
        assert finding.consequence
    # The damaged manifest leaves its blob without a name.
    assert len(findings) == len(victims) + 1


def test_leave_one_out_agrees_with_small_scores_to_first_order(tmp_path: Path) -> None:
    opened = open_small(tmp_path, training={"optimizer": {"name": "sgd", "lr": 1e-3}})
    run(opened)
    key = keys(opened)[0]
    scores = read_scores(opened, key).scores
    found = leave_one_out(opened, key, scores.tolist(), range(12))
    assert [row.unit for row in found.rows] == list(opened.units)
    assert found.pearson > 0.9999
    assert found.spearman > 0.97
    for row in found.rows:
        assert row.actual == pytest.approx(row.predicted, rel=0.02, abs=1e-7)


def test_leave_one_out_takes_the_largest_and_then_others(tmp_path: Path) -> None:
    rows = influential_and_random([0.1, -5.0, 0.2, 3.0, 0.0, 0.3], 2)
    assert rows[:2] == [1, 3]
    assert len(set(rows)) == 4
    opened = open_small(tmp_path)
    train(opened)
    with pytest.raises(InputError, match="row 12 is not one of the 12 scores'"):
        leave_one_out(opened, keys(opened)[0], [0.0] * 12, [12])
