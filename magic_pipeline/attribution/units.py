"""What gets a score of its own: examples, documents of packed rows, or the tokens of examples.

A *unit* is what a row of a score table is and what a weight belongs to: an example, or a document. With `unit: token` the units are
examples, and each of their tokens has a *place* in the walk's accumulators; with the others a unit is one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from magic_pipeline.errors import InputError
from magic_pipeline.tasks import protocol
from magic_pipeline.tasks.protocol import Dataset, Task

Kind = Literal["example", "token", "document"]
_ROWS_AT_ONCE = 64  # of the batches in which tokens are counted


@dataclass(frozen=True)
class Tokens:
    """The tokens of all units in a row: those of unit u are `[offsets[u], offsets[u + 1])`.

    Attributes:
        offsets: `[units + 1]` int64; ids, labels: `[places]` int64, the token and the target at each place (-100: none).
    """

    offsets: Tensor
    ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Units:
    """The units of an experiment.

    Attributes:
        ids: in the order of their first appearance.
        row_of: `[examples]` (of packed rows with `unit: document`: `[documents]`) int64, the unit of each.
        tokens: with `unit: token`.
    """

    kind: Kind
    ids: tuple[str, ...]
    row_of: Tensor
    tokens: Tokens | None = None

    @property
    def places(self) -> int:
        """How many scores a query has."""
        return len(self.ids) if self.tokens is None else len(self.tokens.ids)

    def of_batch(self, task: Task, indices: Sequence[int], batch: Any, block: int) -> tuple[Tensor, Tensor | None]:
        """The units of a batch's losses and, with `unit: token`, the places of its tokens; in the block of a rank.

        Args:
            indices: of the examples in the dataset.
            block: the rank's number among those hosted here.

        Raises:
            InputError: the batch has other tokens or documents than the dataset says.
        """
        if self.kind == "document":
            return self._documents(task, batch, block), None
        rows = self.row_of[list(indices)]
        units = rows + block * len(self.ids)
        if self.tokens is None:
            return units, None
        valid = protocol.token_ids(task, batch) >= 0
        starts, stops = self.tokens.offsets[rows], self.tokens.offsets[rows + 1]
        if not torch.equal(valid.sum(1), stops - starts):
            raise InputError("the number of an example's tokens depends on the batch that it is in", field="task")
        places = starts.unsqueeze(1) + valid.cumsum(1) - 1 + block * self.places
        return units, torch.where(valid, places, -1)

    def _documents(self, task: Task, batch: Any, block: int) -> Tensor:
        documents = protocol.units(task, batch)
        if documents is None or documents.dim() != 2 or int(documents.max()) >= len(self.row_of):
            found = None if documents is None else f"{list(documents.shape)} up to {int(documents.max())}"
            message = f"units(batch) should be [rows, tokens] of indices below {len(self.row_of)}, found {found}"
            raise InputError(message, field="task")
        documents = documents.cpu()
        rows = self.row_of[documents.clamp(min=0)] + block * len(self.ids)
        return torch.where(documents >= 0, rows, -1)


def find_units(task: Task, dataset: Dataset, kind: Kind) -> Units:
    """The units of a task's training data.

    Raises:
        InputError: the task has no documents or no tokens, or examples of one id have different tokens.
    """
    owners: Sequence[str] = dataset.ids
    if kind == "document":
        documents = getattr(dataset, "documents", None)
        if documents is None or not callable(getattr(task, "units", None)):
            raise InputError(
                "document needs packed rows: a task with units(batch), whose training data has documents (their ids); "
                "this one's rows are whole examples, so take example",
                field="attribution.unit",
            )
        owners = documents
    ids = tuple(dict.fromkeys(owners))
    rows = {unit: row for row, unit in enumerate(ids)}
    row_of = torch.tensor([rows[unit] for unit in owners], dtype=torch.int64)
    return Units(kind, ids, row_of, _tokens(task, dataset, ids) if kind == "token" else None)


def _tokens(task: Task, dataset: Dataset, ids: Sequence[str]) -> Tokens:
    if not callable(getattr(task, "token_ids", None)):
        raise InputError("token needs a task with token_ids(batch) and losses [rows, tokens]", field="attribution.unit")
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        indices = range(start, min(start + _ROWS_AT_ONCE, len(dataset)))
        batch = task.collate([dataset[index] for index in indices])
        tokens, labels = protocol.token_ids(task, batch), protocol.token_labels(task, batch)
        for row, index in enumerate(indices):
            kept = tokens[row] >= 0
            own, unit = (tokens[row][kept], labels[row][kept]), dataset.ids[index]
            before = found.setdefault(unit, own)
            if not (torch.equal(before[0], own[0]) and torch.equal(before[1], own[1])):
                message = f"examples with the id {unit!r} have different tokens, so their tokens share no scores"
                raise InputError(message, field="attribution.unit")
    lengths = torch.tensor([0, *(len(found[unit][0]) for unit in ids)])
    return Tokens(
        lengths.cumsum(0), torch.cat([found[unit][0] for unit in ids]), torch.cat([found[unit][1] for unit in ids])
    )
