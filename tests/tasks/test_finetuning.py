"""`causal_lm` from the experiment file alone: checkpoints, data of all kinds, packing, adapters, queries, and what is refused."""

from __future__ import annotations

import csv
import itertools
import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from magic_pipeline.attribution.checking import check_before_training
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.errors import InputError
from magic_pipeline.reporting.of_experiment import query_top_examples
from tests.attribution.test_units import off, tables
from tests.tasks.checkpoint import CONFIG, TEXTS, opened_tuned, save_checkpoint, save_tokenizer, write_lines

LORA = {"type": "lora", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}


def scores_by_central_differences(opened: OpenExperiment, lr: float) -> np.ndarray[Any, Any]:
    """`[units, queries]`, of an ordinary loop: the task's own module, torch.optim.AdamW-free SGD, a weight per example."""
    task: Any = opened.task
    data, h = opened.dataset, 1e-4

    def phi(weights: torch.Tensor) -> np.ndarray[Any, Any]:
        torch.manual_seed(0)
        model = task.build_model().double()
        model.load_state_dict({n: p.clone() for n, p in opened.initial_state.params.items()}, strict=False)
        model.train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.5)
        for indices in opened.order:
            batch = task.collate([data[index] for index in indices])
            out = model(input_ids=batch["tokens"]).logits[:, :-1].log_softmax(-1)
            labels = batch["labels"][:, 1:]
            losses = -out.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2) * (labels >= 0)
            optimizer.zero_grad()
            ((weights[list(indices)].unsqueeze(1) * losses).sum() / (labels >= 0).sum()).backward()
            optimizer.step()
        model.eval()
        values = []
        with torch.no_grad():
            for query in task.queries():
                ids = query.examples[0].tokens.unsqueeze(0)
                out = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
                values.append(float(-out.gather(1, ids[0, 1:, None]).mean()))
        return np.array(values)

    rows = []
    for unit in range(len(data)):
        at = {}
        for factor in (-2, -1, 1, 2):
            weights = torch.ones(len(data), dtype=torch.float64)
            weights[unit] += factor * h
            at[factor] = phi(weights)
        rows.append((8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h))
    return np.array(rows)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all", "lora"])
def test_a_checkpoint_is_tuned_and_attributed_from_yaml_alone(
    tmp_path: Path, adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline; against central differences of an ordinary loop."""
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked for the network"))
    training = {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5}}
    opened = opened_tuned(tmp_path, adapter=adapter, training=training, attribution={"unit": "token"})
    names = set(opened.initial_state.params)
    assert all("lora_" in name for name in names) if adapter else len(names) > 10
    found = tables(opened)
    expected = scores_by_central_differences(opened, 0.5)
    assert off(np.stack([table.scores for table in found], axis=1), expected) < 1e-6
    for table in found:
        assert table.tokens is not None
        assert (table.tokens.scores[table.tokens.labels == -100] == 0).all()
    shown = opened.task.token_text(found[0].tokens_of("t0").ids)  # type: ignore[attr-defined]
    assert shown == [*TEXTS[0].split(), "<end>"]


def read_back(opened: OpenExperiment) -> list[str]:
    return [opened.task.render(opened.dataset[index]) for index in range(len(opened.dataset))]  # type: ignore[attr-defined]


def test_every_form_of_data_gives_the_same_examples(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "lines.txt").write_text("\n\n".join(TEXTS) + "\n")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *((f"t{n}", text) for n, text in enumerate(TEXTS))])
    table = {"id": [f"t{n}" for n in range(len(TEXTS))], "text": list(TEXTS)}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    saved = datasets.Dataset.from_dict(table)
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved, "asked": saved.select([2, 0])}).save_to_disk(tmp_path / "splits")
    expected = [f"{text} <end>" for text in TEXTS]
    ids = {}
    for data in ("train.jsonl", "lines.txt", "texts", "rows.csv", "rows.parquet", "saved", "splits"):
        opened = opened_tuned(tmp_path, data=data)
        assert read_back(opened) == expected, data
        ids[data] = opened.dataset.ids
    assert ids["rows.csv"] == ids["rows.parquet"] == ids["saved"] == ids["splits"] == ids["train.jsonl"]
    assert ids["lines.txt"][1] == "lines.txt:3" and ids["texts"][1] == "1.txt"
    opened = opened_tuned(tmp_path, data="splits", queries={"split": "asked"})
    assert [query.id for query in opened.queries] == ["t2", "t0"]


def test_a_document_that_is_there_twice_has_the_sum_of_both_scores(tmp_path: Path) -> None:
    lines = [{"id": f"t{n}", "text": text} for n, text in enumerate([*TEXTS, TEXTS[1]])]
    write_lines(tmp_path / "apart" / "train.jsonl", lines)
    write_lines(tmp_path / "together" / "train.jsonl", [*lines[:-1], lines[1]])
    apart, together = (tables(opened_tuned(tmp_path / name))[0] for name in ("apart", "together"))
    assert together.ids == apart.ids[:-1]
    expected = apart.scores[:-1].copy()
    expected[1] += apart.scores[-1]
    assert off(together.scores, expected) < 1e-12


def targets(opened: OpenExperiment, index: int) -> str:
    row = opened.dataset[index]
    kept = row.tokens[row.labels != -100]
    text: str = opened.task.tokenizer.decode(kept.tolist())  # type: ignore[attr-defined]
    return text


def test_the_loss_is_on_completions_alone(tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs.jsonl", [{"q": "what ran", "a": "the dog"}, {"q": "who sat", "a": "a cat"}])
    write_lines(tmp_path / "queries.jsonl", [{"id": "q", "q": "who ran", "a": "the cat"}])
    opened = opened_tuned(tmp_path, data="pairs.jsonl", columns={"prompt": "q", "completion": "a"})
    assert read_back(opened)[0] == "what ran the dog <end>" and targets(opened, 0) == "the dog <end>"
    assert opened.dataset.ids == ("pairs.jsonl:1", "pairs.jsonl:2")


def test_the_loss_of_a_chat_is_on_the_assistants_turns(tmp_path: Path) -> None:
    def chat(*turns: str) -> dict[str, Any]:
        names = ("user", "assistant")
        return {"messages": [{"role": names[n % 2], "content": text} for n, text in enumerate(turns)]}

    write_lines(tmp_path / "chats.jsonl", [chat("who ran", "the dog", "where", "over the road"), chat("how", "a cat")])
    write_lines(tmp_path / "queries.jsonl", [{"id": "q", **chat("who sat", "the cat")}])
    opened = opened_tuned(tmp_path, data="chats.jsonl")
    whole = "<user> who ran <end> <bot> the dog <end> <user> where <end> <bot> over the road <end>"
    assert read_back(opened)[0] == whole
    assert targets(opened, 0) == "the dog <end> over the road <end>"


def test_isolated_documents_have_the_scores_of_rows_of_their_own(tmp_path: Path) -> None:
    """The same documents in the same batches: packed rows see only themselves, with positions of their own."""
    whole = opened_tuned(tmp_path, packing="isolated", attribution={"unit": "document"})
    first = [whole.dataset[index].first for index in range(len(whole.dataset))] + [len(TEXTS)]
    order = [[n for row in batch for n in range(first[row], first[row + 1])] for batch in whole.order]
    assert max(b - a for a, b in itertools.pairwise(first)) > 1
    by_document = tables(whole)
    shown = query_top_examples(whole, whole.queries[0].key)
    assert {f"{text} <end>" for text in TEXTS} >= {str(one.render) for one in shown.helpful} != set()
    (tmp_path / "order.json").write_text(json.dumps(order))
    by_example = tables(opened_tuned(tmp_path, training={"order": "order.json"}))
    for documents, examples in zip(by_document, by_example, strict=True):
        assert documents.ids == examples.ids
        assert off(documents.scores, examples.scores) < 1e-10


def test_joined_rows_hold_whole_documents_and_their_scores_add_up(tmp_path: Path) -> None:
    opened = {
        unit: opened_tuned(tmp_path, packing="joined", attribution={"unit": unit}) for unit in ("document", "example")
    }
    found = {unit: tables(one) for unit, one in opened.items()}
    rows = [opened["example"].dataset[index] for index in range(len(opened["example"].dataset))]
    for documents, examples in zip(found["document"], found["example"], strict=True):
        sums = [sum(documents.scores[row.first : row.first + int(row.part.max()) + 1]) for row in rows]
        assert off(sums, examples.scores) < 1e-10
    assert all(len(row.tokens) <= 16 for row in rows)


def phis(folder: Path, lines: list[dict[str, Any]], **queries: Any) -> list[float]:
    write_lines(folder / "queries.jsonl", lines)
    opened = opened_tuned(folder, queries={"file": "queries.jsonl", **queries})
    state = opened.initial_state
    with torch.no_grad():
        return [float(opened.phi(query, state.params, state.buffers)) for query in opened.queries]


A, B, C = ({"text": TEXTS[n]} for n in (0, 1, 2))


def test_queries_are_sums_by_coefficients(tmp_path: Path) -> None:
    alone = phis(tmp_path, [{"id": str(n), **one} for n, one in enumerate((A, B, C))])
    lines: list[dict[str, Any]] = [
        {"id": "mean", "examples": [A, B, C]},
        {"id": "weighted", "examples": [A, B], "coefficients": [2, -0.5]},
        {"id": "contrast", "positive": [A, B], "negative": [C]},
    ]
    a, b, c = alone
    expected = [(a + b + c) / 3, 2 * a - 0.5 * b, (a + b) / 2 - c]
    assert np.allclose(phis(tmp_path, lines), expected, rtol=1e-12)
    assert np.allclose(phis(tmp_path, lines, examples_at_once=1), expected, rtol=1e-12)


def test_scores_do_not_depend_on_the_batches_of_a_query(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    write_lines(tmp_path / "queries.jsonl", [{"id": "set", "examples": [A, B, C]}, {"id": "one", **B}])
    whole, parts = (
        tables(
            opened_tuned(tmp_path / name, queries={"file": str(tmp_path / "queries.jsonl"), "examples_at_once": size})
        )
        for name, size in (("whole", None), ("parts", 2))
    )
    for a, b in zip(whole, parts, strict=True):
        assert off(b.scores, a.scores) < 1e-12


def test_measurements_are_what_they_say_and_train_nothing_again(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"id": "q", **A}, {"id": "own", **A, "measurement": "log_odds"}]
    loss, odds = phis(tmp_path, lines)
    likelihood, again = phis(tmp_path, lines, measurement="log_likelihood")
    opened = opened_tuned(tmp_path)
    assert (
        opened.fingerprint
        == opened_tuned(tmp_path, queries={"file": "queries.jsonl", "measurement": "log_odds"}).fingerprint
    )
    module = opened.recipe.model.module
    ids = opened.queries[0].query.examples[0].tokens
    with torch.no_grad():
        p = module(input_ids=ids.unsqueeze(0)).logits[0, :-1].softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    assert loss == pytest.approx(float(-p.log().mean()), rel=1e-12)
    assert likelihood == pytest.approx(float(p.log().sum()), rel=1e-12)
    assert odds == again == pytest.approx(float((p / (1 - p)).log().mean()), rel=1e-10)
    with pytest.raises(
        InputError, match="query 'q': no measurement 'accuracy'; this task has log_likelihood, log_odds"
    ):
        phis(tmp_path, lines, measurement="accuracy")


def test_frozen_layers_are_in_no_state(tmp_path: Path) -> None:
    opened = opened_tuned(tmp_path, freeze=["*wte*", "*wpe*"])
    assert opened.initial_state.params and not any("wte" in n or "wpe" in n for n in opened.initial_state.params)
    with pytest.raises(InputError, match=r"task.freeze: no parameter is named like '\*lstm\*'; there are for example"):
        opened_tuned(tmp_path, freeze=["*lstm*"])


def test_other_adapters_are_walked_too(tmp_path: Path) -> None:
    modules = {"target_modules": ["mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}
    adapter = {"type": "ia3", "fan_in_fan_out": True, **modules}
    opened = opened_tuned(tmp_path, adapter=adapter)
    assert all("ia3" in name for name in opened.initial_state.params)
    assert np.abs(tables(opened)[0].scores).max() > 1e-6


def test_a_saved_adapter_is_trained_on(tmp_path: Path) -> None:
    first = opened_tuned(tmp_path, adapter=LORA)
    first.module.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    second = opened_tuned(tmp_path, adapter={"folder": "adapter"})
    mine, theirs = first.initial_state.params, second.initial_state.params
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_alpha": 8}))
    assert opened_tuned(tmp_path, adapter={"folder": "adapter"}).fingerprint != second.fingerprint


@pytest.mark.parametrize("size", [1, 3])
def test_token_scores_do_not_depend_on_micro_batches(tmp_path: Path, size: int) -> None:
    """Documents are of 5 to 9 tokens, and the last batch has two: the padding differs with the split."""
    whole = tables(opened_tuned(tmp_path, attribution={"unit": "token"}, storage="whole"))
    split = opened_tuned(tmp_path, attribution={"unit": "token"}, training={"microbatch_size": size}, storage="split")
    for a, b in zip(whole, tables(split), strict=True):
        assert a.tokens is not None and b.tokens is not None
        assert off(b.tokens.scores, a.tokens.scores) < 1e-10


def test_a_tokenizers_start_token_comes_first_and_once(tmp_path: Path) -> None:
    """And its end token too, where it adds one itself."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path / "words")
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(tmp_path / "words")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bot> $A <end>", special_tokens=[("<bot>", 3), ("<end>", 1)]
    )
    tokenizer.save_pretrained(tmp_path / "words")
    opened = opened_tuned(tmp_path, tokenizer="words")
    assert read_back(opened)[0] == f"<bot> {TEXTS[0]} <end>" and targets(opened, 0) == f"{TEXTS[0]} <end>"


def test_a_model_from_a_config_needs_a_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "words")
    opened = opened_tuned(tmp_path, model=dict(CONFIG), tokenizer="words")
    assert read_back(opened)[0] == f"{TEXTS[0]} <end>"
    with pytest.raises(InputError, match="task.tokenizer: a model from a config has no tokenizer"):
        opened_tuned(tmp_path, model=dict(CONFIG))


LLAMA = {
    "model_type": "llama",
    "vocab_size": CONFIG["vocab_size"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


def test_isolated_documents_of_a_model_with_rotary_positions(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "words")
    packed = opened_tuned(tmp_path, model=LLAMA, tokenizer="words", packing="isolated")
    alone = opened_tuned(tmp_path, model=LLAMA, tokenizer="words")
    model = alone.recipe.model.module
    row = packed.dataset[1]
    documents = [alone.dataset[row.first + number] for number in range(int(row.part.max()) + 1)]
    assert row.first > 0 and len(documents) > 1
    with torch.no_grad():
        together = packed.task.example_losses(model, packed.task.collate([row])).flatten()
        each = [alone.task.example_losses(model, alone.task.collate([one])).flatten() for one in documents]
    assert torch.allclose(together, torch.cat(each), rtol=1e-12, atol=1e-14)


def test_a_changed_config_is_another_training(tmp_path: Path) -> None:
    before = opened_tuned(tmp_path).fingerprint
    config = tmp_path / "checkpoint" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"scale_attn_weights": False}))
    assert opened_tuned(tmp_path).fingerprint != before


def groups(*matches: str) -> dict[str, Any]:
    own = [{"match": match, "weight_decay": 0.1 * number} for number, match in enumerate(matches)]
    return {"training": {"optimizer": {"name": "adamw", "groups": own}}}


def long(words: int) -> str:
    return " ".join(["cat"] * words)


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        ([{"id": "x", "text": "  "}], {}, r"train.jsonl: example 'x': row 1: the column 'text' is empty"),
        ([{"id": "x", "text": "cat"}], {"end_token": False}, r"example 'x': row 1: has no target token"),
        ([{"id": "x", **A}, {"id": "y"}], {}, r"example 'y': row 2: the column 'text' is not there; columns: id"),
        ([{"id": "x", **A}], {"columns": {"text": "body"}}, r"the column 'body' is not there; columns: id, text"),
        ([{"id": "x", "body": "the cat"}], {}, r"say which is which in task.columns"),
        ([{"id": "x", "text": 3}], {}, r"should hold text, found int"),
        (
            [{"id": "x", "prompt": long(20), "completion": "cat"}],
            {},
            r"no target token after truncation of 22 tokens to 16",
        ),
        ([{"id": "x", **A}], {"context": 17}, r"task.context: 17 tokens are more than the model's 16 positions"),
        ([{"id": "x", **A}], {"data": "nothing.jsonl"}, r"task.data: there is no file or folder .*nothing.jsonl"),
        ([{"id": "x", **A}], {"model": "./nothing"}, r"task.model: there is no folder .*nothing"),
        ([{"id": "x", **A}], {"adapter": {"type": "lara"}}, r"task.adapter: expected"),
        (
            [{"id": "x", **A}],
            {"adapter": {"type": "prompt_tuning", "num_virtual_tokens": 2}},
            r"tokens of their own in front",
        ),
        (
            [{"id": "x", **A}],
            {"model": {"n_layer": 1}, "tokenizer": "checkpoint"},
            r"task.model: is no config: expected model_type",
        ),
        ([{"id": "x", **A}], {"attention": "flash"}, r"task.attention: expected one of eager, sdpa"),
        ([{"id": "x", "messages": []}], {}, r"example 'x': row 1: messages should be a list"),
        (
            [{"id": "x", "messages": [{"role": "user", "content": "the cat"}]}],
            {},
            r"example 'x': row 1: has no target token \(only the assistant's turns are targets\)",
        ),
        ([], {}, r"train.jsonl: task.data: holds no record"),
        (
            [{"id": "x", "text": float("nan")}],
            {},
            r"example 'x': row 1: the column 'text' should hold text, found float",
        ),
        (
            [{"id": "x", **A}],
            {"columns": ["text"]},
            r"tuned.yaml: task.columns: expected {text: ...}.*found \['text'\]",
        ),
        ([{"id": "x", **A}], {"model": None}, r"tuned.yaml: task.model: expected a folder .*, found None"),
        ([{"id": "x", **A}], {"tokenizer": "./nothing"}, r"tuned.yaml: task.tokenizer: there is no folder .*nothing"),
        (
            [{"id": "x", **A}],
            {"adapter": {"type": "lora", "target_modules": ["nothing"]}},
            r"tuned.yaml: task.adapter: expected .*Target modules {'nothing'} not found",
        ),
        (
            [{"id": "x", **A}],
            {"adapter": {"type": "lora", "target_modules": "*("}},
            r"tuned.yaml: task.adapter: expected",
        ),
        (
            [{"id": "x", **A}],
            {"freeze": ["*nothing*"]},
            r"task.freeze: no parameter is named like '\*nothing\*'; there are",
        ),
        ([{"id": "x", **A}], {"freeze": ["*"]}, r"tuned.yaml: task: the model has no trainable parameter"),
        (
            [{"id": "x", **A}],
            groups("nothing"),
            r"tuned.yaml: training.optimizer.groups\[0\].match: 'nothing' is found in no trainable",
        ),
        (
            [{"id": "x", **A}],
            groups(".", "bias"),
            r"tuned.yaml: training.optimizer.groups\[1\].match: 'bias' is found in no parameter left",
        ),
    ],
)
def test_wrong_data_is_one_error_with_file_row_and_id(
    tmp_path: Path, lines: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    write_lines(tmp_path / "train.jsonl", lines)
    with pytest.raises(InputError, match=message) as caught:
        opened_tuned(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": long(17)}, r"queries.jsonl: example 'q': row 1: is 18 tokens long; the context holds 16"),
        ({"text": ""}, r"example 'q': row 1: the column 'text' is empty"),
        ({"examples": []}, r"query 'q': line 1: expected examples to be a list of at least one example"),
        ({"positive": [A]}, r"query 'q': line 1: field 'negative' is missing"),
        ({"text": "the cat", "txt": 1}, r"query 'q': line 1: unknown field 'txt'"),
        (
            {"examples": [A], "coefficients": [0]},
            r"queries.jsonl: query 'q': line 1: expected a coefficient other than 0",
        ),
        ({"examples": [A], "coefficients": [1, 2]}, r"queries.jsonl: query 'q': line 1: expected 1 coefficients"),
    ],
)
def test_wrong_queries_are_one_error_with_file_line_and_id(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    write_lines(tmp_path / "queries.jsonl", [{"id": "q", **line}])
    with pytest.raises(InputError, match=message):
        opened_tuned(tmp_path)


def test_two_queries_of_one_id_name_both_lines(tmp_path: Path) -> None:
    write_lines(tmp_path / "queries.jsonl", [{"id": "q", **A}, {"id": "other", **A}, {"id": "q", "text": "a bird"}])
    with pytest.raises(InputError, match=r"queries.jsonl: query 'q': line 3: line 1 has this id already"):
        opened_tuned(tmp_path)


def test_a_broken_checkpoint_says_what_is_broken(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    opened_tuned(tmp_path)
    config, weights = (tmp_path / "checkpoint" / name for name in ("config.json", "model.safetensors"))
    given, tensors = config.read_text(), load_file(weights)
    config.write_text(json.dumps(json.loads(given) | {"n_embd": 12}))
    with pytest.raises(
        InputError, match=r"task.model: 'checkpoint' cannot be loaded: its weights have other shapes than"
    ):
        opened_tuned(tmp_path)
    config.write_text(given)
    for file in (tmp_path / "checkpoint").glob("token*"):
        file.rename(tmp_path / file.name)
    with pytest.raises(InputError, match=r"tuned.yaml: task.tokenizer: 'checkpoint' has no tokenizer"):
        opened_tuned(tmp_path)
    tensors["transformer.h.0.ln_1.weight"][3] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"tuned.yaml: .*: the model's 'transformer.h.0.ln_1.weight' is not finite before"
    ):
        check_before_training(opened_tuned(tmp_path, tokenizer="."))


@pytest.mark.parametrize("setting", ["model", "data", "tokenizer"])
def test_a_hub_name_without_network_is_one_error_at_once(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    save_checkpoint(tmp_path / "checkpoint")
    began = time.monotonic()
    with pytest.raises(
        InputError,
        match=rf"task.{setting}: .*'some/name' cannot be fetched from the hub: the hub's server \(.*\) cannot be reached",
    ):
        opened_tuned(tmp_path, **{setting: "some/name"})
    assert time.monotonic() - began < 20
