"""Fine-tuning a Hugging Face encoder: copy this file, load your checkpoint with from_pretrained, replace the texts."""

import ast
import importlib.util
import re
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query

VOCABULARY = 1024
PACKAGES = ("asyncio", "email", "unittest")


class WhichPackage:
    """From which package of Python's standard library does a function come? Words hashed to numbers are tokens, 0 is padding."""

    def __init__(self, length: int = 64, per_package: int = 60):
        self.length, self.texts = length, []
        for label, package in enumerate(PACKAGES):
            files = sorted(Path(importlib.util.find_spec(package).origin).parent.glob("*.py"))
            found = [
                (f"{package}/{file.stem}:{node.lineno}", ast.unparse(node), label)
                for file in files
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                if isinstance(node, ast.FunctionDef) and len(ast.unparse(node)) > length
            ]
            self.texts += found[:: max(1, len(found) // per_package)][:per_package]

    def build_model(self):
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=self.length, num_labels=len(PACKAGES),
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,  # dropout is differentiated too, but predicts worse
        )  # fmt: skip
        return BertForSequenceClassification(config)

    def training_data(self):
        chosen = [one for number, one in enumerate(self.texts) if number % 10]
        return InMemoryDataset(chosen, [name for name, _, _ in chosen])

    def queries(self):
        return [Query(one[0], [one]) for number, one in enumerate(self.texts) if number % 10 == 0][:6]

    def collate(self, examples):
        words = [re.findall(r"\w+", text)[: self.length] for _, text, _ in examples]
        rows = [[1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in row] for row in words]
        tokens = torch.tensor([row + [0] * (self.length - len(row)) for row in rows])
        return {"tokens": tokens, "labels": torch.tensor([label for _, _, label in examples])}

    def example_losses(self, model, batch):
        logits = model(input_ids=batch["tokens"], attention_mask=(batch["tokens"] > 0).long()).logits
        return F.cross_entropy(logits, batch["labels"], reduction="none")

    def render(self, example):
        return example[1]
