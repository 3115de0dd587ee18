"""Tensors to and from a byte stream, in torch's own file format. The only module of this room that imports torch.

`torch.save` streams (it never seeks), so a blob needs no copy in RAM beside the tensors it is made of. torch's reader
checks nothing (30 of 30 flipped bits went unseen), so callers verify size and digest before they load.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import BinaryIO, cast

import torch
from torch import Tensor


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as `torch.save` should see them: detached, and none dragging a larger storage along.

    `torch.save` writes a tensor's *whole* storage, so one lane of a `[lanes, ...]` tensor would write all lanes. A
    contiguous slice on the CPU is narrowed to its own part of that storage without a copy; any other view of a larger
    storage (strided, or on another device) is cloned. Two names that share memory come back as two tensors when they
    were narrowed or cloned, so aliasing is not part of what is stored: only names, dtypes, shapes and bytes are.

    Raises:
        TypeError: a tensor is sparse, quantised or on the meta device, named.
    """
    return {name: _own_storage(name, tensor) for name, tensor in tensors.items()}


def _own_storage(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(name, str):
        raise TypeError(f"expected text as a tensor's name, found {name!r}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(f"{name}: only dense tensors with data can be stored, found {tensor.layout} on {tensor.device}")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    storage = tensor.untyped_storage()
    if storage.nbytes() <= tensor.nbytes:
        return tensor
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.numel() == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    start = tensor.storage_offset() * tensor.element_size()
    own = storage[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(own, 0, tensor.shape, tensor.stride())


def save_tensors(tensors: Mapping[str, Tensor], stream: BinaryIO) -> None:
    """Streams the tensors to `stream`, which needs `write` only. `tensors` come from `storable`."""
    torch.save(dict(tensors), cast(io.BufferedWriter, stream))


def load_tensors(stream: BinaryIO) -> dict[str, Tensor]:
    """The tensors on the CPU, in private memory, bit for bit as they were stored.

    Not memory-mapped: a mapped page is read again after the digest was verified, so damage that came later would reach
    the numbers unseen, and a truncated file would kill the process with SIGBUS.
    """
    loaded = torch.load(stream, map_location="cpu", weights_only=True)
    return cast(dict[str, Tensor], loaded)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements' bytes in row-major order. A view of the tensor's memory where it is contiguous and on the CPU."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
