"""Whole problems: a model, its data, its batches and its queries, with the training settings left open.

Learning rates are large and runs are short, so that the optimizer's curvature matters and no score vanishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.reference import models
from tests.reference.problem import SGD, AdamW, Batch, ExampleLosses, Measurement, MicroBatch, Problem, micro_batches

IGNORED = -100


def classifier_losses(module: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return cross_entropy(module(inputs), labels, reduction="none")


def token_losses(module: nn.Module, batch: Batch) -> Tensor:
    """`[rows]`: each row's summed cross entropy over its own next tokens; -100 pads."""
    tokens = batch
    logits = module(input_ids=tokens.clamp(min=0), attention_mask=(tokens != IGNORED).long()).logits
    targets = tokens[:, 1:]
    log_probabilities = logits[:, :-1].log_softmax(-1)
    picked = log_probabilities.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -torch.where(targets == IGNORED, torch.zeros_like(picked), picked).sum(1)


def target_tokens(batch: Batch) -> float:
    return float((batch[:, 1:] != IGNORED).sum())


def rows_of(batch: Batch) -> float:
    return float(len(batch[1]))


def mean_measurement(losses: ExampleLosses, size: Callable[[Batch], float], batch: Batch) -> Measurement:
    return lambda module: losses(module, batch).sum() / size(batch)


@dataclass(frozen=True)
class Family:
    """A model with its data.

    Args:
        gather: makes the batch of some example rows.
        epochs: how often the examples are gone through, each time in another order.
        smallest: the fewest rows that a micro-batch may have (batch statistics want two).
        lr: the peak learning rate, by optimizer.
    """

    build: Callable[[], nn.Module]
    losses: ExampleLosses
    size: Callable[[Batch], float]
    gather: Callable[[Tensor], Batch]
    queries: Sequence[Batch]
    examples: int
    batch_size: int
    epochs: int = 2
    smallest: int = 1
    lr: tuple[float, float] = (0.3, 0.05)

    def steps(self, micro: int) -> list[tuple[MicroBatch, ...]]:
        generator = torch.Generator().manual_seed(11)
        batches: list[Tensor] = []
        for _ in range(self.epochs):
            batches += torch.split(torch.randperm(self.examples, generator=generator), self.batch_size)
        return [
            micro_batches(rows, count=micro, gather=self.gather, size=self.size, seed=step + 1, smallest=self.smallest)
            for step, rows in enumerate(batches)
        ]

    def problem(
        self, optimizer: SGD | AdamW, *, clip_norm: float | None = None, micro: int = 1, train_mode: bool = True
    ) -> Problem:
        steps = self.steps(micro)
        peak = self.lr[isinstance(optimizer, AdamW)]
        rates = [peak * (1 - 0.5 * step / len(steps)) for step in range(len(steps))]
        measurements = [mean_measurement(self.losses, self.size, batch) for batch in self.queries]
        return Problem(
            self.build,
            self.losses,
            steps,
            optimizer,
            rates,
            measurements,
            self.examples,
            clip_norm,
            train_mode,
        )


def vectors(examples: int, features: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(classes, (examples,), generator=generator)


def picked(inputs: Tensor, labels: Tensor, rows: Tensor) -> Batch:
    return inputs[rows], labels[rows]


def mlp(dropout: float = 0.0, batch_size: int = 4, epochs: int = 2) -> Family:
    """12 examples of 5 features, 3 classes, Linear-Tanh-Linear: batches of 4 give 6 steps, batches of 5 end ragged."""
    inputs, labels = vectors(16, 5, 3, seed=5)
    return Family(
        partial(models.mlp, dropout=dropout),
        classifier_losses,
        rows_of,
        partial(picked, inputs, labels),
        [(inputs[12:14], labels[12:14]), (inputs[14:], labels[14:])],
        12,
        batch_size,
        epochs,
    )


def conv_net(momentum: float | None = 0.3, affine: bool = True, tracked: bool = True) -> Family:
    """18 pictures of 6 x 6; batches of 8, 8 and 2."""
    inputs, labels = vectors(22, 36, 3, seed=6)
    pictures = inputs.view(-1, 1, 6, 6)
    return Family(
        partial(models.conv_net, momentum, affine, tracked),
        classifier_losses,
        rows_of,
        partial(picked, pictures, labels),
        [(pictures[18:20], labels[18:20]), (pictures[20:], labels[20:])],
        18,
        8,
        smallest=2,
        lr=(0.1, 0.02),
    )


def ragged_texts(examples: int, vocabulary: int, context: int, seed: int) -> list[Tensor]:
    """Token rows of 3 to `context` tokens that follow a noisy rule, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(examples):
        length = int(torch.randint(3, context + 1, (), generator=generator))
        start, stride = torch.randint(1, vocabulary, (2,), generator=generator).tolist()
        noise = torch.randint(2, (length,), generator=generator)
        texts.append((start + stride * torch.arange(length) + noise) % vocabulary)
    return texts


def padded(texts: Sequence[Tensor], rows: Tensor) -> Batch:
    return nn.utils.rnn.pad_sequence([texts[row] for row in rows.tolist()], batch_first=True, padding_value=IGNORED)


def gpt2(*, tied: bool = True, layers: int = 1, dropout: float = 0.0, attention: str = "eager") -> Family:
    """10 texts of 3 to 8 tokens; batches of 3, 3, 3 and 1."""
    texts = ragged_texts(13, 13, 8, seed=7)
    queries = [padded(texts, torch.tensor([10, 11])), padded(texts, torch.tensor([12]))]
    build = partial(models.gpt2, tied=tied, layers=layers, dropout=dropout, attention=attention)
    return Family(build, token_losses, target_tokens, partial(padded, texts), queries, 10, 3, epochs=1, lr=(0.3, 0.01))
