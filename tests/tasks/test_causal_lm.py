"""The byte-level language model: documents, queries, and losses that do not depend on padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.causal_lm import CausalLMText
from magic_pipeline.tasks.protocol import QuerySource, denominator, query_measurement

SMALL: dict[str, Any] = {"layers": 1, "d_model": 8, "heads": 2, "context": 16, "min_bytes": 1, "text_folder": "text"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "lines.txt").write_text("\n\n".join(f"verse {n} of the song" for n in range(40)))
    return tmp_path


def small(folder: Path, **settings: Any) -> CausalLMText:
    return CausalLMText(**{**SMALL, "documents": 4, "folder": folder, **settings})


def from_file(folder: Path, *lines: dict[str, Any]) -> CausalLMText:
    file = folder / "queries.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return small(folder, queries=QuerySource(file=file))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_changes_no_loss(folder: Path, attention: str) -> None:
    task = small(folder, attention=attention)
    model = task.build_model().double().eval()
    texts = [b"a", b"bytes of text", b"more"]
    together = task.example_losses(model, task.collate(texts))
    alone = torch.cat([task.example_losses(model, task.collate([text])) for text in texts])
    assert torch.allclose(together, alone, rtol=1e-12, atol=0)
    assert together.dtype == torch.float64


def test_a_loss_is_the_sum_over_the_documents_own_bytes(folder: Path) -> None:
    task = small(folder)
    model = task.build_model().double().eval()
    logits = model(input_ids=torch.tensor([[256, 104, 105]])).logits[0]
    expected = -(F.log_softmax(logits[0], 0)[104] + F.log_softmax(logits[1], 0)[105])
    batch = task.collate([b"hi", b"longer"])
    assert task.example_losses(model, batch)[0].item() == pytest.approx(expected.item(), rel=1e-12)
    assert task.measurement(model, batch)[0].item() == pytest.approx(expected.item() / 2, rel=1e-12)
    assert denominator(task, batch) == 8.0


def test_the_denominator_adds_up_over_shards(folder: Path) -> None:
    task = small(folder)
    data = list(task.training_data())
    whole = denominator(task, task.collate(data))
    assert whole == sum(denominator(task, task.collate([example])) for example in data)


def test_training_documents_are_cut_to_the_context(folder: Path) -> None:
    task = small(folder)
    data = task.training_data()
    assert {len(example) for example in data} == {15}
    assert task.collate([data[0]])["tokens"].shape == (1, 16)
    assert task.render(data[0]) == data[0].decode()


def test_queries_are_held_out_and_asking_for_more_keeps_the_first(folder: Path) -> None:
    few, more = (small(folder, queries=QuerySource(split="held_out", count=count)).queries() for count in (1, 2))
    assert few[0].id == more[0].id
    everything = small(folder, documents=1).training_data().ids, small(folder, documents=30).training_data().ids
    assert everything[1][:1] == everything[0]
    assert not set(everything[1]) & {query.id for query in more}


def test_a_files_texts_are_queries_of_their_own_mean_loss(folder: Path) -> None:
    task = from_file(folder, {"id": "é|x", "text": "né"})
    (query,) = task.queries()
    model = task.build_model().eval()
    batch = task.collate(["né".encode()])
    expected = task.example_losses(model, batch).item() / 3
    assert query.id == "é|x"
    assert query_measurement(task, model, query).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "q", "text": ""}, "an empty query has no target token"),
        ({"id": "q", "text": None}, "an empty query has no target token"),
        ({"id": "q", "text": "x" * 16}, "the text is 16 bytes long; at most 15 fit into the context"),
        ({"id": "q", "text": "é" * 8}, "the text is 16 bytes long; at most 15 fit into the context"),
        ({"id": "q"}, "field 'text' is missing"),
        ({"id": "q", "text": "x", "label": 1}, "unknown field 'label'"),
    ],
)
def test_a_query_that_cannot_be_measured_is_refused_by_name(folder: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        from_file(folder, line).queries()
    assert "query 'q': line 1: " in str(raised.value)
    assert message in str(raised.value)


def test_a_query_of_exactly_the_context_is_taken(folder: Path) -> None:
    task = from_file(folder, {"id": "q", "text": "x" * 15})
    query_measurement(task, task.build_model(), task.queries()[0]).item()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"documents": 1000}, "task.documents"),
        ({"documents": 0}, "task.documents"),
        ({"d_model": 9}, "task.d_model"),
        ({"context": 1}, "task.context"),
        ({"dropout": 1.0}, "task.dropout"),
        ({"dropout": "0.1"}, "task.dropout"),
        ({"tied": "yes"}, "task.tied"),
        ({"attention": "flash_attention_2"}, "task.attention"),
        ({"max_bytes": 3, "min_bytes": 4}, "task.max_bytes"),
        ({"modules": "json/*"}, "task.modules"),
        ({"text_folder": "nowhere"}, "task.text_folder"),
        ({"queries": None}, "queries"),
        ({"queries": QuerySource(split="test")}, "queries.split"),
        ({"queries": QuerySource(split="held_out", count=99)}, "queries.count"),
    ],
)
def test_a_wrong_setting_is_refused_by_field(folder: Path, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as raised:
        small(folder, **settings).queries()
    assert raised.value.field == field


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_ties_its_embeddings_unless_asked_not_to(folder: Path, tied: bool) -> None:
    model: Any = small(folder, tied=tied).build_model()
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied


def test_the_model_is_deterministic_under_a_seed(folder: Path) -> None:
    task = small(folder)
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(task.build_model().state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
