"""Whether the storage has room for what is about to be made, asked before hours are spent on it."""

from __future__ import annotations

from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import StorageFullError
from magic_pipeline.metagradient.state import TrainState

# Beside its tensors a checkpoint holds their names, a manifest, an epoch and a ledger entry.
_BESIDE = 64 * 2**10


def state_bytes(state: TrainState) -> int:
    """Bytes of a sealed state."""
    return sum(tensor.nbytes for tensor in state.flat().values()) + _BESIDE


def walk_bytes(state: TrainState, units: int) -> int:
    """Bytes that one query's walk takes at most: two generations of its checkpoint, and the next."""
    item = next(iter(state.params.values())).element_size()
    return 3 * (state_bytes(state) + units * item)


def check_free_space(store: Store, needed: int, what: str) -> None:
    """Raises StorageFullError when `store` has less than `needed` bytes left, naming both; does nothing where nobody knows."""
    free = store.sink.free_bytes()
    if free is not None and free < needed:
        raise StorageFullError(
            f"{store.url}: {what} takes {needed} bytes ({needed / 2**30:.2f} GiB), and {free} ({free / 2**30:.2f} GiB) are free; "
            "free space or choose another storage, and run again: nothing is lost"
        )
