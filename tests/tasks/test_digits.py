"""The digits classifier: its data, its queries and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL.Image import Image
from sklearn.datasets import load_digits

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.digits import DigitsClassifier
from magic_pipeline.tasks.protocol import QuerySource, query_measurement


def from_file(folder: Path, *lines: dict[str, Any]) -> DigitsClassifier:
    file = folder / "queries.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return DigitsClassifier(queries=QuerySource(file=file))


def test_the_bundled_order_is_split_into_training_and_test() -> None:
    bundle = load_digits()
    task = DigitsClassifier(train_size=1000, queries=QuerySource(split="test"))
    data, queries = task.training_data(), task.queries()
    assert (len(data), len(queries)) == (1000, 797)
    assert data.ids[999] == f"train-0999-digit-{bundle.target[999]}"
    assert queries[1].id == f"test-0001-digit-{bundle.target[1001]}"
    batch = task.collate([data[999], queries[1].examples[0]])
    assert torch.equal(batch["pixels"].double() * 16, torch.tensor(bundle.images[[999, 1001]]).unsqueeze(1))
    assert batch["labels"].tolist() == bundle.target[[999, 1001]].tolist()


def test_asking_for_more_queries_keeps_the_first() -> None:
    few = DigitsClassifier(queries=QuerySource(split="test", count=3)).queries()
    more = DigitsClassifier(queries=QuerySource(split="test", count=5)).queries()
    assert [query.id for query in few] == [query.id for query in more[:3]]


def test_queries_of_a_file_are_positions_in_the_test_split(tmp_path: Path) -> None:
    task = from_file(tmp_path, {"id": "a", "index": 2}, {"id": "b", "indices": [0, 3], "coefficients": [1, -1]})
    single, contrast = task.queries()
    model = task.build_model().double()
    losses = task.example_losses(model, task.collate(list(DigitsClassifier()._test[:4])))
    assert query_measurement(task, model, single).item() == pytest.approx(losses[2].item(), rel=1e-14)
    assert query_measurement(task, model, contrast).item() == pytest.approx((losses[0] - losses[3]).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "q", "index": 297}, "expected a position in the test split, 0 to 296, found 297"),
        ({"id": "q", "index": -1}, "found -1"),
        ({"id": "q", "index": "3"}, "found '3'"),
        ({"id": "q", "index": True}, "found True"),
        ({"id": "q", "indices": 3}, "expected indices and coefficients to be lists"),
        ({"id": "q", "indices": []}, "expected at least one example, found none"),
        ({"id": "q", "indices": [1], "coefficients": [1, 2]}, "expected 1 coefficients"),
        ({"id": "q"}, "field 'indices' is missing"),
        ({"id": "q", "index": 1, "weight": 2}, "unknown field 'weight'; known: id, index"),
    ],
)
def test_a_wrong_query_is_refused_by_name(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        from_file(tmp_path, line).queries()
    assert "query 'q'" in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"model": "cnn"}, "task.model"),
        ({"activation": "sigmoid"}, "task.activation"),
        ({"hidden": 0}, "task.hidden"),
        ({"hidden": 8.0}, "task.hidden"),
        ({"train_size": 1797}, "task.train_size"),
        ({"train_size": True}, "task.train_size"),
    ],
)
def test_a_wrong_setting_is_refused_by_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as raised:
        DigitsClassifier(**settings)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (None, "queries"),
        (QuerySource(split="validation"), "queries.split"),
        (QuerySource(split="test", count=298), "queries.count"),
    ],
)
def test_queries_that_are_not_there_are_refused(source: QuerySource | None, field: str) -> None:
    with pytest.raises(InputError) as raised:
        DigitsClassifier(queries=source).queries()
    assert raised.value.field == field


@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_the_model_is_deterministic_under_a_seed_and_keeps_its_dtype(model: str) -> None:
    task = DigitsClassifier(model=model, hidden=3)
    built = []
    for _ in range(2):
        torch.manual_seed(5)
        built.append(task.build_model())
    batch = task.collate([task.training_data()[i] for i in range(4)])
    assert torch.equal(*(task.example_losses(each, batch) for each in built))
    losses = task.example_losses(built[0].double(), batch)
    assert (losses.dtype, losses.shape) == (torch.float64, (4,))


def test_a_query_can_measure_the_margin() -> None:
    task = DigitsClassifier(hidden=3)
    model, batch = task.build_model(), task.collate([task.training_data()[i] for i in range(4)])
    p = model(batch["pixels"]).softmax(1)[torch.arange(4), batch["labels"]]
    assert torch.allclose(task.measurements["log_odds"](model, batch), (p / (1 - p)).log(), atol=1e-5)


def test_a_digit_is_shown_dark_on_white() -> None:
    task = DigitsClassifier()
    shown = task.render(task.training_data()[0])
    assert isinstance(shown, Image)
    assert (shown.size, shown.getpixel((0, 0))) == ((96, 96), 255)
    assert min(shown.tobytes()) <= 255 - 15 * 255 // 16


def test_a_digit_is_shown_as_text_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    task = DigitsClassifier()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert task.render(task.training_data()[7]) == "a handwritten 7"
