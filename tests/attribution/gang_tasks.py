"""Tasks that are slow, loud or ill-behaved in the processes of a gang. They are imported there, so no pytest in here."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from magic_pipeline.checkpoints.store import Store
from tests.attribution.small_task import SmallTask

BEATS, FAIL, SLEEPERS = Path("beats"), Path("fail"), Path("sleepers")  # in the working directory


def process_number() -> int | None:
    """This process's number in a gang; None in a process that is none of a gang's."""
    return int(sys.argv[3]) if Path(sys.argv[0]).name == "rank_process.py" else None


class Beating(SmallTask):
    """Takes its time, and counts the forward passes of all processes: the file `beats` grows by a byte with each."""

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        with BEATS.open("ab") as beats:
            beats.write(b".")
        time.sleep(0.1)
        return super().example_losses(model, batch)


class Unruly(SmallTask):
    """Prints more than a pipe holds, leaves a thread and a child behind, and fails where the file `fail` is, in one process.

    Process 1 alone makes the examples in the second half of a batch.
    """

    def build_model(self) -> nn.Module:
        if process_number() is not None:
            threading.Thread(target=time.sleep, args=(600,)).start()
            sleeper = subprocess.Popen(["sleep", "600"])
            with SLEEPERS.open("a") as file:
                file.write(f"{sleeper.pid}\n")
        return super().build_model()

    def example_losses(self, model: nn.Module, batch: Any, /) -> Tensor:
        if process_number() is not None:
            for stream in (sys.stdout, sys.stderr):
                print("chatter " * 20_000, file=stream)
            if FAIL.exists() and process_number() == 1:
                raise ArithmeticError("example of process 1 is beyond me")
        return super().example_losses(model, batch)


class SlowDisk(SmallTask):
    """Each process of a gang waits once for writing and once for reading, at different times, longer than collectives wait."""

    seconds = 5.0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        number = process_number()
        if number == 0:
            _delay_once("create_json", self.seconds, lambda path: "/ledger/" in path)
            _delay_once("read_blob", self.seconds)
        elif number == 1:
            _delay_once("write_blob", self.seconds)
            _delay_once("verify_blob", self.seconds)


def _delay_once(name: str, seconds: float, counts: Any = lambda path: True) -> None:
    """The first call of this method of a store that `counts` says yes to takes so much longer."""
    original, left = getattr(Store, name), [seconds]

    def delayed(store: Store, path: str, *arguments: Any, **settings: Any) -> Any:
        if left and counts(path):
            time.sleep(left.pop())
        return original(store, path, *arguments, **settings)

    setattr(Store, name, delayed)
