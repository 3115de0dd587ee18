"""A program that is killed: forks one writer per durable operation and SIGKILLs it before or in the middle of it.

`python -m tests.checkpoints.killed_writer FOLDER` seals, retires, completes and clears a chain in FOLDER/{mode}-{n} for
every n, and prints one JSON line per killed writer. Right after an operation is right before the next one, so the two
modes cover all three. torch is imported once; the writers are forks of a single-threaded process.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from magic_pipeline.checkpoints import Chain, Holder, Store
from magic_pipeline.checkpoints import store as store_module

FACTS = {"training": "t1"}
STEPS = (3, 2, 1)
SYSTEM_CALLS = ("fsync", "link", "replace", "unlink")


def state(step: int) -> dict[str, torch.Tensor]:
    return {"params/w": torch.arange(2048.0) * (step + 1), "counters/n": torch.tensor(step)}


def work(store: Store, ledger: Path) -> None:
    """The writer's whole life, going on from wherever the last one was killed."""
    chain = Chain(store, "q")
    lease = chain.take(Holder.this_process("writer"))
    if chain.completed(FACTS) is None:
        newest = chain.newest(FACTS, order="lowest")
        for step in STEPS if newest is None else range(newest.step - 1, 0, -1):
            lease.seal(step, {"rank0": state(step), "rank1": state(step + 100)}, FACTS)
            with open(ledger, "a") as stream:
                stream.write(f"{step}\n")
            lease.retire(order="lowest")
        lease.complete({"scores": state(0)}, FACTS)
        with open(ledger, "a") as stream:
            stream.write("0\n")
    lease.clear()
    lease.release()


def kill_at(n: int, mode: str) -> None:
    """Arranges this process's death at its n-th write or system call that storage depends on."""
    count = itertools.count()

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **kwargs: Any) -> Any:
            if next(count) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return calling

    def half_write(self: Any, content: Any) -> int:
        if self._stream is not None and next(count) == n:
            self._stream.write(memoryview(content)[: len(content) // 2])
            self._stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, content)

    write = store_module._HashingWriter.write
    if mode == "during":
        store_module._HashingWriter.write = half_write  # type: ignore[method-assign]
    else:
        for name in SYSTEM_CALLS:
            setattr(os, name, mortal(getattr(os, name)))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # torch.save makes some 35 small writes a blob; every 7th, wherever it falls, is enough of them.
    for mode, stride in (("before", 1), ("during", 7)):
        for n in itertools.count(0, stride):
            place = folder / f"{mode}-{n}"
            place.mkdir()
            child = os.fork()
            if child == 0:
                kill_at(n, mode)
                work(Store(str(place / "store")), place / "ledger")
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                assert status == 0, f"the writer failed: {status}"
                break
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            sys.stdout.write(json.dumps({"mode": mode, "n": n, "place": str(place)}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
