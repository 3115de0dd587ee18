"""The stored runs of tests/oracle as a task: GPT-2 with eager attention and untied embeddings, a row of tokens an example."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query
from tests.reference import models


class OracleTask:
    """Losses are sums over a row's tokens, the denominator counts them; a query measures the mean."""

    def __init__(self, file: str) -> None:
        with np.load(file) as stored:
            self.settings = json.loads(str(stored["meta"]))
            self.rows = torch.from_numpy(stored["tokens"]).flatten(0, 1)
            self.asked = torch.from_numpy(stored["query_tokens"])

    def build_model(self) -> nn.Module:
        sizes = {"layers": "layers", "width": "d_model", "heads": "heads", "vocabulary": "vocab", "context": "seq"}
        return models.gpt2(**{name: self.settings[stored] for name, stored in sizes.items()}, tied=False)

    def training_data(self) -> InMemoryDataset:
        return InMemoryDataset(self.rows, [f"row {number}" for number in range(len(self.rows))])

    def queries(self) -> Sequence[Query]:
        return [Query(f"query {number}", [tokens]) for number, tokens in enumerate(self.asked)]

    def collate(self, examples: Sequence[Tensor], /) -> Tensor:
        return torch.stack(list(examples))

    def example_losses(self, model: nn.Module, batch: Tensor, /) -> Tensor:
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        return cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").sum(1)

    def denominator(self, batch: Tensor, /) -> float:
        return float(batch[:, 1:].numel())

    def measurement(self, model: nn.Module, batch: Tensor, /) -> Tensor:
        return self.example_losses(model, batch) / (batch.shape[1] - 1)
