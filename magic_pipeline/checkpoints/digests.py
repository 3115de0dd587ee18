"""Digests: of JSON content (fingerprints), and of tensors by value. Nothing here touches storage.

A fingerprint is a sha256, for it names folders that must never collide. Digests of bytes are xxh3_128 (14 GB/s against
0.9 GB/s): they find damage, they do not resist an adversary.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import xxhash

from magic_pipeline.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

DIGEST_PREFIX = "xxh3_128:"


def plain(value: object, where: str = "") -> Any:
    """The value as JSON would give it back: dicts with text keys, lists, text, bool, int, finite float, None.

    Raises:
        InputError: a float is NaN or infinite (JSON has no such number), named by its dotted place.
        TypeError: a key is not text (`1` and `"1"` would become one key) or a value is not JSON's.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"expected a finite number, found {value!r}", field=where or None)
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where or 'content'}: expected text as key, found {key!r}")
        return {key: plain(item, f"{where}.{key}" if where else key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{where or 'content'}: {type(value).__name__} has no JSON form")


def canonical_json(content: object) -> str:
    """One text per value: keys sorted, no spaces, ASCII, floats by `repr` (so `1` and `1.0` are two values).

    Raises: InputError and TypeError, as `plain`.
    """
    return json.dumps(plain(content), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def fingerprint(content: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON, 64 hex digits.

    >>> fingerprint({"lr": 0.1, "steps": 3}) == fingerprint({"steps": 3, "lr": 0.1})
    True

    Raises: InputError and TypeError, as `plain`.
    """
    return hashlib.sha256(canonical_json(content).encode("ascii")).hexdigest()


def bytes_digest(content: bytes) -> str:
    """`xxh3_128:<hex>` of the bytes."""
    return DIGEST_PREFIX + xxhash.xxh3_128(content).hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """`xxh3_128:<hex>` of names, dtypes, shapes and bytes: equal exactly when every tensor is equal bit for bit.

    Independent of the mapping's order, of strides, of the device and of how torch serialises. A zero and a minus zero
    differ, as do two NaNs of different bits. One tensor at a time is copied to the CPU when it is not there.
    """
    from magic_pipeline.checkpoints.tensor_files import tensor_bytes

    hasher = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update((canonical_json([name, str(tensor.dtype), list(tensor.shape)]) + "\n").encode("ascii"))
        hasher.update(tensor_bytes(tensor))
    return DIGEST_PREFIX + hasher.hexdigest()
