"""A list of examples in memory as a Dataset, and the digest of what they hold."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from magic_pipeline.errors import InputError


class InMemoryDataset:
    """Examples with their ids, in the order given.

    Args:
        examples: of tensors, arrays, numbers, strings, bytes, None, and dicts, sequences and dataclasses of these.
        ids: one non-empty string per example; equal ids share one weight.

    Raises:
        InputError: no example, another number of ids than examples, or an id that is not a non-empty string.
    """

    def __init__(self, examples: Iterable[Any], ids: Iterable[str]) -> None:
        self._examples: Sequence[Any] = tuple(examples)
        self.ids: Sequence[str] = tuple(ids)
        if not self._examples:
            raise InputError("expected at least one training example, found none", field="task")
        if len(self.ids) != len(self._examples):
            raise InputError(f"found {len(self._examples)} examples but {len(self.ids)} ids", field="task")
        identity: Any
        for index, identity in enumerate(self.ids):
            if not isinstance(identity, str) or not identity:
                raise InputError(
                    f"example {index}: expected a non-empty string as id, found {identity!r}", field="task"
                )

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int, /) -> Any:
        return self._examples[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._examples)

    @cached_property
    def digest(self) -> str:
        """sha256 of ids and examples in order; the same in every process and on every platform of one byte order."""
        return content_digest([list(self.ids), list(self._examples)])


def content_digest(content: Any) -> str:
    """sha256 (hex) of a value's type and content; dicts are taken in the order of their keys' text.

    Raises:
        InputError: something in it is of a type whose content cannot be told (a set, an open file, an object).
    """
    digest = hashlib.sha256()
    for part in _parts(content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(content: Any) -> Iterable[bytes]:
    """The value as byte strings; each container says its kind and length, so that no two values have the same parts."""
    if content is None or isinstance(content, (bool, int, float, str)):
        yield type(content).__name__.encode()
        yield repr(content).encode("utf-8", "surrogatepass")
    elif isinstance(content, bytes):
        yield from (b"bytes", content)
    elif isinstance(content, (torch.Tensor, np.ndarray, np.generic)):
        yield from _array_parts(content)
    elif isinstance(content, Mapping):
        yield f"dict {len(content)}".encode()
        for key in sorted(content, key=repr):
            yield from _parts(key)
            yield from _parts(content[key])
    elif isinstance(content, (list, tuple)):
        yield f"{'list' if isinstance(content, list) else 'tuple'} {len(content)}".encode()
        for item in content:
            yield from _parts(item)
    elif dataclasses.is_dataclass(content) and not isinstance(content, type):
        yield type(content).__name__.encode()
        yield from _parts({field.name: getattr(content, field.name) for field in dataclasses.fields(content)})
    else:
        kind = type(content).__name__
        message = (
            f"cannot digest a {kind}: use tensors, arrays, numbers, text, dicts and lists, or give the dataset a digest"
        )
        raise InputError(message, field="task")


def _array_parts(array: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> Iterable[bytes]:
    if isinstance(array, torch.Tensor):
        tensor = array.detach().cpu().contiguous()
        yield f"tensor {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.flatten().view(torch.uint8).numpy().tobytes()
    elif array.dtype.hasobject:
        raise InputError("cannot digest an array of Python objects", field="task")
    else:
        yield f"array {array.dtype.str} {array.shape}".encode()
        yield array.tobytes()
