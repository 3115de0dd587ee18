"""A gang of real processes, over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from magic_pipeline.errors import GangError


class ProcessGang:
    """The processes of a torch.distributed group (see `ranks.Gang`).

    Every call raises GangError when another process ends, or does not make its call before the group's time-out.

    Args:
        group: by default all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.processes = dist.get_world_size(group)
        self.process = dist.get_rank(group)

    def exchange(self, rows: Tensor) -> Tensor:
        sent = rows.reshape(-1)
        received = torch.empty_like(sent)
        with self._together():
            dist.all_to_all_single(received, sent, group=self._group)
        return received.reshape(rows.shape)

    def gather(self, tensor: Tensor) -> Tensor:
        mine = tensor.reshape(-1)
        every = mine.new_empty(self.processes * mine.numel())
        with self._together():
            dist.all_gather_single(every, mine, group=self._group)
        return every.reshape(self.processes, *tensor.shape)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what gloo and NCCL raise, whatever happened
            told = str(error).strip().partition("\n")[0]
            raise GangError(f"process {self.process} of the gang has lost the others: {told}") from error
