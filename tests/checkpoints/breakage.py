"""Damage as disks and people do it, through the store's own sink, so that it is the same on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

from magic_pipeline.checkpoints import Store


def raw_bytes(store: Store, path: str) -> bytes:
    with store.sink.fetch(path) as stream:
        return stream.read()


def overwrite(store: Store, path: str, content: bytes) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(content)

    store.sink.publish(path, write, exclusive=False)


def flip_a_bit(store: Store, path: str, at: float = 0.5) -> None:
    content = bytearray(raw_bytes(store, path))
    content[int(at * (len(content) - 1))] ^= 1
    overwrite(store, path, bytes(content))


def truncate(store: Store, path: str) -> None:
    overwrite(store, path, raw_bytes(store, path)[:-7])


def zero_a_range(store: Store, path: str) -> None:
    content = raw_bytes(store, path)
    middle = len(content) // 2
    overwrite(store, path, content[:middle] + bytes(32) + content[middle + 32 :])


def empty(store: Store, path: str) -> None:
    overwrite(store, path, b"")


def extend(store: Store, path: str) -> None:
    overwrite(store, path, raw_bytes(store, path) + b"\n")


def remove(store: Store, path: str) -> None:
    store.delete(path)


DAMAGE: dict[str, Callable[[Store, str], None]] = {
    f.__name__: f for f in (flip_a_bit, truncate, zero_a_range, empty, extend)
}
