"""Logical ranks: who makes which part of a batch, and who owns which part of the optimizer's slots and of the cotangents.

A batch is split over R logical ranks, whatever number W of processes works on it: process w hosts the ranks w, w + W, w + 2W, ...
Each rank owns one of R equal ranges of all parameters in a row. Its slots, and the cotangents of its range, are with the process
that hosts it and nowhere else; parameters are everywhere. Gradients are summed in the order of the ranks, so that the number of
processes changes no bit (rounds of W ranks at a time, each round's in order, is that order).

Collectives move equal amounts from every process, which all make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class Gang(Protocol):
    """W processes that work in step.

    Attributes:
        processes: W.
        process: this one's number, from 0.
    """

    processes: int
    process: int

    def exchange(self, rows: Tensor) -> Tensor:
        """`[W, ...]`: row q goes to process q; row p of the result came from process p."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """`[W, ...]`: every process's tensor, in the order of the processes; all are of one shape."""
        ...


class Alone:
    """One process: what it sends it has."""

    processes = 1
    process = 0

    def exchange(self, rows: Tensor) -> Tensor:
        return rows

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)


@dataclass(frozen=True)
class Ranks:
    """R logical ranks on a gang. With R = 1 every operation gives back what it was given.

    Raises:
        ValueError: the processes do not divide the ranks.
    """

    count: int = 1
    gang: Gang = field(default_factory=Alone)

    def __post_init__(self) -> None:
        if self.count < 1 or self.count % self.gang.processes:
            raise ValueError(f"{self.gang.processes} processes cannot share {self.count} ranks equally")

    @property
    def hosted(self) -> range:
        """The ranks of this process, ascending: one a round."""
        return range(self.gang.process, self.count, self.gang.processes)

    def owned(self, pieces: Tensors, rank: int) -> Tensors:
        """One rank's among the hosted pieces."""
        if self.count == 1:
            return pieces
        return {name: piece for name, piece in pieces.items() if name.startswith(f"{rank}:")}

    def of_all(self, mine: Tensor) -> Tensor:
        """`[hosted, ...]` of each process to `[R, ...]` in the order of the ranks."""
        # Round k of process p is rank k W + p.
        return self.gang.gather(mine).transpose(0, 1).reshape(self.count, *mine.shape[1:])

    def total(self, mine: Sequence[float], device: torch.device) -> float:
        """The sum over all ranks of one number each, in their order."""
        if self.count == 1:
            return sum(mine)
        values = self.of_all(torch.tensor(list(mine), dtype=torch.float64, device=device))
        return float(sum(values.tolist()))

    def agree(self, yes: bool, device: torch.device) -> bool:
        """Whether any process says yes: the same answer for all."""
        if self.gang.processes == 1:
            return yes
        return bool(self.gang.gather(torch.tensor([float(yes)], device=device)).any())

    # Pieces: the hosted ranks' parts of a dict of tensors, as 1-D tensors named "{rank}:{name}". A leading axis of lanes stays.

    def cut(self, tensors: Tensors) -> Tensors:
        """The hosted pieces of whole tensors, as views."""
        if self.count == 1:
            return tensors
        layout = _Layout.of({name: tensor.shape for name, tensor in tensors.items()}, self.count)
        return {
            piece.name: tensors[piece.of].reshape(-1)[piece.start : piece.stop]
            for rank in self.hosted
            for piece in layout.pieces(rank)
        }

    def join(self, pieces: Tensors, like: Tensors) -> Tensors:
        """Whole tensors, from every rank's pieces; the inverse of `cut`.

        Args:
            pieces: this process's; each `[n]`, or `[lanes, n]`.
            like: gives the names and shapes of the whole tensors (without lanes).
        """
        if self.count == 1:
            return pieces
        layout = _Layout.of({name: tensor.shape for name, tensor in like.items()}, self.count)
        lead = next(iter(pieces.values())).shape[:-1] if pieces else torch.Size()
        sample = next(iter(like.values()))
        mine = torch.stack([layout.vector(pieces, rank, lead, sample) for rank in self.hosted])
        ranges = self.of_all(mine).movedim(0, -2)
        return layout.whole(ranges.reshape(*lead, -1))

    def add(self, into: Tensors, whole: Sequence[Tensor | None], like: Tensors, rows: slice | None = None) -> None:
        """Adds this round's whole tensors, one set from each process, into the pieces of their owners, in the order of the ranks.

        Args:
            into: this process's pieces, changed in place; with lanes, only the lanes `rows`.
            whole: by the names of `like`, with the lanes of `rows` in front where there are lanes; None is zero.
            like: gives the names and shapes of the whole tensors (without lanes).
        """
        if self.count == 1:
            for tensor, addend in zip(into.values(), whole, strict=True):
                if addend is not None:
                    (tensor if rows is None else tensor[rows]).add_(addend)
            return
        layout = _Layout.of({name: tensor.shape for name, tensor in like.items()}, self.count)
        lead = torch.Size() if rows is None else torch.Size([rows.stop - rows.start])
        sent = layout.by_owner(
            dict(zip(like, whole, strict=True)), lead, next(iter(like.values())), self.gang.processes
        )
        for received in self.gang.exchange(sent):
            for position, rank in enumerate(self.hosted):
                for part in layout.pieces(rank):
                    target = into[part.name] if rows is None else into[part.name][rows]
                    target.add_(received[..., position, part.offset : part.offset + part.stop - part.start])


@dataclass(frozen=True)
class _Piece:
    """A part of one tensor in a rank's range: elements `start` to `stop` of tensor `of`, at `offset` in the range."""

    name: str
    of: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class _Layout:
    """R equal ranges of all tensors in a row; what the last one has too much is padding."""

    shapes: tuple[tuple[str, torch.Size], ...]
    ranks: int

    @classmethod
    def of(cls, shapes: Mapping[str, torch.Size], ranks: int) -> _Layout:
        return cls(tuple(shapes.items()), ranks)

    @property
    def length(self) -> int:
        """Elements of a range."""
        return -(-sum(shape.numel() for _, shape in self.shapes) // self.ranks)

    def pieces(self, rank: int) -> tuple[_Piece, ...]:
        """The rank's pieces, in the order of the tensors."""
        return _pieces(self, rank)

    def vector(self, pieces: Tensors, rank: int, lead: torch.Size, sample: Tensor) -> Tensor:
        """The rank's range `[*lead, length]`, padded."""
        parts = [pieces[piece.name] for piece in self.pieces(rank)]
        padding = self.length - sum(part.shape[-1] for part in parts)
        return torch.cat([*parts, sample.new_zeros(*lead, padding)], dim=-1)

    def whole(self, vector: Tensor) -> dict[str, Tensor]:
        """Tensors by name from all ranges in a row `[*lead, R * length]`."""
        lead, tensors, begin = vector.shape[:-1], {}, 0
        for name, shape in self.shapes:
            tensors[name] = vector[..., begin : begin + shape.numel()].reshape((*lead, *shape))
            begin += shape.numel()
        return tensors

    def by_owner(self, whole: Mapping[str, Tensor | None], lead: torch.Size, sample: Tensor, processes: int) -> Tensor:
        """`[W, *lead, R / W, length]`: for each process, the ranges of the ranks that it hosts."""
        parts = []
        for name, shape in self.shapes:
            part = whole[name]
            parts.append(sample.new_zeros(*lead, shape.numel()) if part is None else part.reshape(*lead, shape.numel()))
        padding = self.ranks * self.length - sum(part.shape[-1] for part in parts)
        vector = torch.cat([*parts, sample.new_zeros(*lead, padding)], dim=-1)
        # Rank k W + q is process q's k-th: [..., R / W, W, length] with W moved to the front.
        return vector.reshape(*lead, self.ranks // processes, processes, self.length).movedim(-2, 0).contiguous()


@lru_cache(maxsize=1024)
def _pieces(layout: _Layout, rank: int) -> tuple[_Piece, ...]:
    first, last = rank * layout.length, (rank + 1) * layout.length
    found, begin = [], 0
    for name, shape in layout.shapes:
        end = begin + shape.numel()
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            found.append(_Piece(f"{rank}:{name}", name, start - begin, stop - begin, start - first))
        begin = end
    return tuple(found)
