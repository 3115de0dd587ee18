"""A language model small enough to differentiate by hand, on ragged sequences with masked prompts, a duplicate, and packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query

VOCABULARY, WIDTH = 7, 5
IDS = ("a", "b", "c", "d", "e", "a", "f", "g", "h")  # a is there twice
Example = list[tuple[str, Tensor, int]]  # documents of a row: id, tokens, how many of them are prompt


def documents() -> list[tuple[str, Tensor, int]]:
    """Nine documents of 3 to 6 tokens with prompts of 1 to 3."""
    generator = torch.Generator().manual_seed(3)
    made: dict[str, tuple[str, Tensor, int]] = {}
    for number, name in enumerate(dict.fromkeys(IDS)):
        tokens = torch.randint(VOCABULARY, (3 + number % 4,), generator=generator)
        made[name] = (name, tokens, 1 + number % 2)
    return [made[name] for name in IDS]


class PrefixModel(nn.Module):
    """Logits of the next token from the mean of the embeddings so far in the document."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, together: Tensor) -> Tensor:
        """`together` [rows, tokens, tokens]: which earlier tokens each position sees, as 1 and 0."""
        mean = together.to(self.out.weight.dtype) @ self.embedding(tokens) / together.sum(2, keepdim=True)
        logits: Tensor = self.out(torch.tanh(mean))
        return logits


class SequenceTask:
    """Token losses; one document a row, or `packed` ones: two a row.

    Args:
        padding: columns of padding beyond the longest row.
    """

    def __init__(self, packed: bool = False, padding: int = 0) -> None:
        self.packed, self.padding = packed, padding

    def build_model(self) -> nn.Module:
        return PrefixModel()

    def training_data(self) -> Any:
        rows: list[Example] = [[document] for document in documents()]
        if not self.packed:
            return InMemoryDataset(rows, IDS)
        rows = [documents()[at : at + 2] for at in range(0, len(IDS), 2)]
        data: Any = InMemoryDataset(rows, [f"row{n}" for n in range(len(rows))])
        data.documents = IDS
        self.index = {id(row): at for row, at in zip(data, range(0, len(IDS), 2), strict=True)}
        return data

    def queries(self) -> Sequence[Query]:
        ask = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([6, 1, 4, 4])
        return [Query(f"q{n}", [[(f"q{n}", tokens, 1)]]) for n, tokens in enumerate(ask)]

    def collate(self, examples: Sequence[Example], /) -> Any:
        width = self.padding + max(sum(len(tokens) for _, tokens, _ in example) for example in examples)
        shape = (len(examples), width)
        batch = {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, -100),
            "documents": torch.full(shape, -1),
            "part": torch.full(shape, -1),
        }
        for row, example in enumerate(examples):
            at = 0
            for number, (_, tokens, prompt) in enumerate(example):
                place = slice(at, at + len(tokens))
                batch["tokens"][row, place], batch["part"][row, place] = tokens, number
                batch["labels"][row, at + prompt : at + len(tokens)] = tokens[prompt:]
                if self.packed:
                    batch["documents"][row, place] = getattr(self, "index", {}).get(id(example), 0) + number
                at += len(tokens)
        return batch

    def units(self, batch: Any) -> Tensor | None:
        documents: Tensor = batch["documents"]
        return documents if self.packed else None

    def token_ids(self, batch: Any) -> Tensor:
        tokens: Tensor = batch["tokens"]
        return tokens.masked_fill(batch["part"] < 0, -1)

    def token_labels(self, batch: Any) -> Tensor:
        labels: Tensor = batch["labels"]
        return labels

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        part = batch["part"]
        together = (part.unsqueeze(2) == part.unsqueeze(1)).tril()
        logits = model(batch["tokens"], together)[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
        return F.pad(losses.view(len(part), -1), (1, 0))

    def denominator(self, batch: Any) -> float:
        return float((batch["labels"] != -100).sum())


class ReducedLosses(SequenceTask):
    """One loss a row, where tokens are asked for."""

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        return super().example_losses(model, batch).sum(1)


class LossOfPadding(SequenceTask):
    """Padding has a loss."""

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        losses = super().example_losses(model, batch)
        found: Tensor = losses + (batch["part"] < 0) * losses.sum()
        return found


class TwoTextsOfOneId(SequenceTask):
    """The second document of an id has other tokens."""

    def training_data(self) -> Any:
        rows = [[document] for document in documents()]
        rows[5] = [("a", rows[1][0][1], 1)]
        return InMemoryDataset(rows, IDS)
