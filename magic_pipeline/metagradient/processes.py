"""A gang of real processes, over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class ProcessGang:
    """The processes of a torch.distributed group (see `ranks.Gang`). A process that ends breaks the others' calls with an error.

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
        dist.all_to_all_single(received, sent, group=self._group)
        return received.reshape(rows.shape)

    def gather(self, tensor: Tensor) -> Tensor:
        mine = tensor.reshape(-1)
        every = mine.new_empty(self.processes * mine.numel())
        dist.all_gather_single(every, mine, group=self._group)
        return every.reshape(self.processes, *tensor.shape)
