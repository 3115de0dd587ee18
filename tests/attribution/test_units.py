"""Scores of tokens and of documents: against central differences of an ordinary loop, and against the scores of examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from magic_pipeline.attribution.leave_one_out import retrain
from magic_pipeline.attribution.observing import CheckpointSealed
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.planning import plan_experiment
from magic_pipeline.attribution.rank_parts import part_of
from magic_pipeline.attribution.score_table import ScoreTable
from magic_pipeline.attribution.scores import read_scores, write_scores
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.batched_training import batched_step, repeated
from magic_pipeline.metagradient.step import train_step
from tests.attribution import running
from tests.attribution.running import keys, open_small
from tests.attribution.sequence_task import IDS, SequenceTask

TASKS = "tests.attribution.sequence_task"
LR, MOMENTUM, EPOCHS = 0.4, 0.5, 2


def opened_with(folder: Path, unit: str, kind: str = "SequenceTask", **changes: Any) -> OpenExperiment:
    task = {"type": f"{TASKS}:{kind}", **changes.pop("task", {})}
    training = {
        "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM},
        "schedule": {"name": "constant"},
        **changes.pop("training", {}),
    }
    attribution = {"unit": unit, **changes.pop("attribution", {})}
    return open_small(folder, task=task, training=training, attribution=attribution, **changes)


def tables(opened: OpenExperiment) -> list[ScoreTable]:
    train(opened)
    walk(opened, keys(opened))
    for key in keys(opened):
        write_scores(opened, key)
    return [read_scores(opened, key) for key in keys(opened)]


def off(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest expected score."""
    assert np.abs(expected).max() > 1e-4, "the scores vanish: the comparison would say nothing"
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max() / np.abs(expected).max())


def phi_of_ordinary_loop(opened: OpenExperiment, weights: dict[str, Tensor]) -> list[float]:
    """Trains with torch.optim and a weight per token of each id; every query's measurement of the result."""
    task = SequenceTask()
    data, model = task.training_data(), task.build_model().double()
    model.load_state_dict({n: p.clone() for n, p in opened.initial_state.params.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for batch_indices in opened.order:
        batch = task.collate([data[index] for index in batch_indices])
        losses = task.example_losses(model, batch)
        total = sum(
            (losses[row, : len(weights[data.ids[index]])] * weights[data.ids[index]]).sum()
            for row, index in enumerate(batch_indices)
        )
        optimizer.zero_grad()
        (total / task.denominator(batch)).backward()  # type: ignore[union-attr]
        optimizer.step()
    with torch.no_grad():
        return [float(task.example_losses(model, task.collate(q.examples)).sum()) for q in task.queries()]


def test_token_scores_are_central_differences_of_an_ordinary_loop(tmp_path: Path) -> None:
    opened = opened_with(tmp_path, "token")
    found = tables(opened)
    ones = {name: torch.ones(len(found[0].tokens_of(name).ids), dtype=torch.float64) for name in opened.units}
    h, largest, worst = 1e-4, 0.0, 0.0
    for name in opened.units:
        for place in range(len(ones[name])):
            at = {}
            for factor in (-2, -1, 1, 2):
                moved = {**ones, name: ones[name].clone()}
                moved[name][place] += factor * h
                at[factor] = np.array(phi_of_ordinary_loop(opened, moved))
            differences = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h)
            scores = np.array([table.tokens_of(name).scores[place] for table in found])
            worst = max(worst, float(np.abs(scores - differences).max()))
            largest = max(largest, float(np.abs(differences).max()))
    assert largest > 1e-3
    assert worst < 1e-9 * largest, (worst, largest)


def test_token_scores_sum_to_the_examples_and_masked_places_are_exactly_0(tmp_path: Path) -> None:
    by_token, by_example = (tables(opened_with(tmp_path / unit, unit)) for unit in ("token", "example"))
    for tokens, examples in zip(by_token, by_example, strict=True):
        assert tokens.ids == examples.ids == tuple(dict.fromkeys(IDS))
        assert off(tokens.scores, examples.scores) < 1e-10
        assert tokens.tokens is not None
        masked = tokens.tokens.labels == -100
        assert masked.sum() >= len(tokens.ids)
        assert (tokens.tokens.scores[masked] == 0).all()
        assert (tokens.tokens.scores[~masked] != 0).all()


@pytest.mark.parametrize("unit", ["token", "document"])
@pytest.mark.parametrize(
    "changes",
    [
        {"task": {"padding": 3}},
        {"training": {"microbatch_size": 1}},
        {"training": {"microbatch_size": 3}},
        {"ranks": 2, "processes": 1},
    ],
    ids=["padding", "one by one", "ragged micro-batches", "two ranks"],
)
def test_scores_do_not_depend_on_padding_micro_batches_and_ranks(
    tmp_path: Path, unit: str, changes: dict[str, Any]
) -> None:
    packed = {"packed": unit == "document"}
    plain = tables(opened_with(tmp_path / "plain", unit, task=packed))
    changed = {**changes, "task": packed | changes.get("task", {})}
    other = tables(opened_with(tmp_path / "other", unit, **changed))
    for a, b in zip(plain, other, strict=True):
        assert a.ids == b.ids
        assert off(b.scores, a.scores) < 1e-10
        if unit == "token":
            assert a.tokens is not None and b.tokens is not None
            assert np.array_equal(a.tokens.offsets, b.tokens.offsets)
            assert off(b.tokens.scores, a.tokens.scores) < 1e-10


def test_documents_of_packed_rows_have_the_scores_of_examples(tmp_path: Path) -> None:
    """The same documents in the same batches, one a row and two a row."""
    packed_order = [[4, 0], [1, 3, 2], [2, 1], [0, 3, 4]]
    of_row = {row: [n for n in (2 * row, 2 * row + 1) if n < len(IDS)] for row in range(5)}
    plain_order = [[n for row in batch for n in of_row[row]] for batch in packed_order]
    found = {}
    for unit, order in {"document": packed_order, "example": plain_order}.items():
        (tmp_path / unit).mkdir()
        (tmp_path / unit / "order.json").write_text(json.dumps(order))
        task = {"packed": unit == "document"}
        found[unit] = tables(opened_with(tmp_path / unit, unit, task=task, training={"order": "order.json"}))
    for documents, examples in zip(found["document"], found["example"], strict=True):
        by_id = dict(zip(documents.ids, documents.scores, strict=True))
        assert set(by_id) == set(IDS)
        assert off([by_id[name] for name in examples.ids], examples.scores) < 1e-10


@pytest.mark.parametrize("unit", ["document", "token"])
def test_scores_are_central_differences_of_retraining_with_weights(tmp_path: Path, unit: str) -> None:
    """As validation retrains: documents of packed rows have weights of their own, tokens share that of their example."""
    opened = opened_with(tmp_path, unit, task={"packed": unit == "document"})
    found, h = tables(opened), 1e-4
    query = opened.queries[0]
    differences = []
    for row in range(len(opened.units)):
        at = {}
        for factor in (-2, -1, 1, 2):
            weights = torch.ones(len(opened.units), dtype=torch.float64)
            weights[row] += factor * h
            trained = retrain(opened, weights)
            with torch.no_grad():
                at[factor] = float(opened.phi(query, trained.params, trained.buffers))
        differences.append((8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h))
    assert off(found[0].scores, differences) < 1e-8


def test_many_trainings_at_once_weigh_documents_like_one_at_a_time(tmp_path: Path) -> None:
    opened = opened_with(tmp_path, "document", task={"packed": True, "padding": 2}, training={"microbatch_size": 2})
    state, shards = opened.initial_state, opened.data(0)
    weights = torch.rand(3, len(opened.units), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    after, losses = batched_step(opened.recipe, repeated(opened.recipe, state, 3), shards, weights)
    for run, of_run in enumerate(weights):
        alone, record = train_step(opened.recipe, state, shards, of_run)
        assert float(losses[run]) == pytest.approx(record.loss, rel=1e-12)
        for name, tensor in alone.params.items():
            assert torch.allclose(after.params[name][run], tensor, rtol=1e-11, atol=1e-13)
            assert not torch.equal(tensor, state.params[name])


@pytest.mark.parametrize("unit", ["token", "document"])
def test_a_rank_holds_the_scores_of_its_own_examples(tmp_path: Path, unit: str) -> None:
    opened = opened_with(tmp_path, unit, task={"packed": unit == "document"}, ranks=2, processes=1)
    table = tables(opened)[0]
    complete = opened.query_chain(opened.queries[0]).completed({}, read=[part_of(0), part_of(1)])
    assert complete is not None
    held = [complete.tensors(part_of(rank))["scores"] for rank in range(2)]
    places: list[set[int]] = [set(), set()]
    for step in range(opened.steps):
        for shard in opened.data(step):
            places[shard.rank] |= {
                int(place) % opened.scored.places for place in shard.score_places.flatten() if place >= 0
            }
    for rank in range(2):
        assert set(held[rank].nonzero().flatten().tolist()) <= places[rank]
        assert held[rank].any() and len(held[rank]) == opened.scored.places
    assert places[0] != places[1]
    whole = table.scores if table.tokens is None else table.tokens.scores
    assert np.array_equal((held[0] + held[1]).numpy(), whole)


def test_a_packed_row_belongs_to_its_documents(tmp_path: Path) -> None:
    opened = opened_with(tmp_path, "document", task={"packed": True})
    named = [[opened.units[unit] for unit in opened.units_of_example(row)] for row in range(5)]
    assert named == [["a", "b"], ["c", "d"], ["a", "e"], ["f", "g"], ["h"]]
    assert opened_with(tmp_path, "token").units_of_example(5) == [0]


def test_another_unit_walks_again_and_trains_nothing(tmp_path: Path) -> None:
    first = opened_with(tmp_path, "example")
    tables(first)
    second = opened_with(tmp_path, "token")
    assert second.fingerprint == first.fingerprint
    assert not any(status.complete for status in query_statuses(second))
    begun = running.trained(second)
    tables(second)
    assert running.trained(second) == begun
    found = verify_experiment(second)
    assert found.checked and not found.findings
    again = opened_with(tmp_path, "example")
    assert all(status.complete for status in query_statuses(again))


def test_a_token_walk_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = tables(opened_with(tmp_path / "whole", "token"))
    opened = opened_with(tmp_path / "stopped", "token")
    train(opened)
    with pytest.raises(running.CrashError):
        walk(opened, keys(opened), observe=running.crash_at(1, CheckpointSealed))
    assert whole == tables(opened_with(tmp_path / "stopped", "token"))


def test_the_file_says_what_its_lists_are(tmp_path: Path) -> None:
    opened = opened_with(tmp_path, "token")
    table = tables(opened)[0]
    sheet = write_scores(opened, keys(opened)[0])
    schema = pq.read_schema(tmp_path / "store" / sheet.path)
    assert schema.metadata[b"magic_pipeline.unit"] == b"token"
    assert b"negative score" in schema.metadata[b"magic_pipeline.sign_convention"]
    for name in ("token_score", "token_id", "token_label"):
        field = schema.field(name)
        assert field.metadata[b"entry"] == b"token" and field.metadata[b"description"]
    first = table.tokens_of("a")
    data = SequenceTask().training_data()
    assert first.ids.tolist() == data[0][0][1].tolist()
    assert first.labels[0] == -100 and first.labels.tolist()[1:] == first.ids.tolist()[1:]
    with pytest.raises(InputError, match="no unit 'z'"):
        table.tokens_of("z")


def test_the_plan_counts_the_places(tmp_path: Path) -> None:
    plans = {unit: plan_experiment(opened_with(tmp_path / unit, unit)) for unit in ("example", "token")}
    tokens = sum({name: len(row[0][1]) for name, row in zip(IDS, SequenceTask().training_data(), strict=True)}.values())
    assert (plans["example"].places, plans["token"].places) == (8, tokens)
    assert plans["token"].checkpoint_bytes - plans["example"].checkpoint_bytes == 8 * (tokens - 8)
    assert any(f"{tokens} a query: one for each token" in line for line in plans["token"].lines())


@pytest.mark.parametrize(
    ("unit", "kind", "message"),
    [
        ("document", "SequenceTask", "document needs packed rows"),
        ("token", "TwoTextsOfOneId", "the id 'a' have different tokens"),
    ],
)
def test_what_has_no_scores_is_refused_when_it_is_opened(tmp_path: Path, unit: str, kind: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        opened_with(tmp_path, unit, kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("ReducedLosses", r"for scores of tokens it should give \[4, \d\]"), ("LossOfPadding", "no token")],
)
def test_losses_that_fit_no_token_are_refused_before_training(tmp_path: Path, kind: str, message: str) -> None:
    opened = opened_with(tmp_path, "token", kind)
    with pytest.raises(InputError, match=message):
        train(opened)
    assert not running.trained(opened)
