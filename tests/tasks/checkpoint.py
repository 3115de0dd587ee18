"""A pretrained checkpoint as people have one: a folder with a model in safetensors form, its config, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "flew",
    "on",
    "over",
    "mat",
    "road",
    "tree",
    "red",
    "blue",
    "old",
]
WORDS += ["how", "what", "who", "where"]
SPECIAL = ["<unk>", "<end>", "<user>", "<bot>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }}{{ ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)
CONFIG: Mapping[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": len(WORDS) + len(SPECIAL),
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TEXTS = (
    "the cat sat on the mat",
    "a dog ran over the road",
    "the old bird flew over a tree",
    "the red cat ran",
    "a blue bird sat on the old tree",
    "who ran over the red mat",
)


def save_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def save_checkpoint(folder: Path) -> None:
    """A small GPT-2 whose weights are not those of any seed that the engine sets."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(77)
    fields = dict(CONFIG)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    save_tokenizer(folder)


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_experiment(folder: Path, **changes: Any) -> Path:
    """A YAML file for a checkpoint in `folder / "checkpoint"`, data and queries; `changes` are of the task unless named as sections."""
    if not (folder / "checkpoint").exists():
        save_checkpoint(folder / "checkpoint")
    if not (folder / "train.jsonl").exists():
        write_lines(folder / "train.jsonl", [{"id": f"t{n}", "text": text} for n, text in enumerate(TEXTS)])
    if not (folder / "queries.jsonl").exists():
        lines = [{"id": "one", "text": "the dog sat on the mat"}, {"id": "two", "text": "a bird flew"}]
        write_lines(folder / "queries.jsonl", lines)
    sections: dict[str, Any] = {
        name: changes.pop(name)
        for name in ("training", "attribution", "queries", "ranks", "storage")
        if name in changes
    }
    content: dict[str, Any] = {
        "name": "tuned",
        "storage": "store",
        "task": {"type": "causal_lm", "model": "checkpoint", "data": "train.jsonl", **changes},
        "training": {
            "epochs": 2,
            "batch_size": 4,
            "dtype": "float64",
            "optimizer": {"name": "adamw", "lr": 0.02, "eps_root": 1e-8},
            "schedule": {"name": "constant"},
            **sections.pop("training", {}),
        },
        "attribution": {"threads": 1, "chunk": 2, **sections.pop("attribution", {})},
        "queries": {"file": "queries.jsonl"},
        **sections,
    }
    path = folder / "tuned.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def opened_tuned(folder: Path, **changes: Any) -> OpenExperiment:
    return open_experiment(load_experiment(write_experiment(folder, **changes)))
