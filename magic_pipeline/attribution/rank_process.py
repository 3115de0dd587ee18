"""One process of a gang, started by gang.py alone.

`python -m magic_pipeline.attribution.rank_process PARENT PORT PROCESS PROCESSES PIPE`: it reads its job from standard input and says
over the pipe what happens.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from magic_pipeline.attribution.board import StoreBoard
from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.gang import Job
from magic_pipeline.attribution.opening import choose_device, open_experiment
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import MagicError
from magic_pipeline.metagradient.processes import ProcessGang

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    parent, port, process, processes, pipe = map(int, arguments)
    _die_with(parent)
    messages = _Messages(Connection(pipe, readable=False))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.getLogger("magic_pipeline").addHandler(_Forward(messages))
    logging.getLogger("magic_pipeline").setLevel(logging.INFO)
    experiment, job = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    try:
        messages.send("result", _work(experiment, job, messages, stop, port, process, processes))
        return 0
    except BaseException as error:
        messages.send("error", _portable(error))
        if not isinstance(error, MagicError):
            logging.getLogger("magic_pipeline").debug("", exc_info=True)
            sys.excepthook(type(error), error, error.__traceback__)
        return 1


def _work(
    experiment: Experiment,
    job: Job,
    messages: _Messages,
    stop: threading.Event,
    port: int,
    process: int,
    processes: int,
) -> Any:
    minutes = experiment.attribution.collective_timeout_minutes
    on_gpus = choose_device(experiment.device).type == "cuda"
    if on_gpus:
        torch.cuda.set_device(process % torch.cuda.device_count())
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(days=30))
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=PrefixStore("numbers", store),
        rank=process,
        world_size=processes,
        timeout=timedelta(minutes=minutes),
    )
    board = StoreBoard(PrefixStore("board", store), process, processes)
    opened = open_experiment(experiment, gang=ProcessGang(), board=board)
    try:
        if job.work == "train":
            return train(opened, observe=messages.event, should_stop=stop.is_set)
        return walk(opened, job.keys, observe=messages.event, should_stop=stop.is_set)
    finally:
        # All have said what they have to say before anybody hangs up.
        if sys.exception() is None:
            board.collect(None)
            dist.destroy_process_group()


class _Messages:
    """What the parent hears; from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        with self._lock:
            self._connection.send((kind, content))

    def event(self, event: object) -> None:
        self.send("event", event)


class _Forward(logging.Handler):
    def __init__(self, messages: _Messages) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.send("log", (record.levelno, record.getMessage()))


def _portable(error: BaseException) -> BaseException:
    """The error as it crosses the pipe: itself if it can be taken apart and put together again, else its class and message."""
    with suppress(Exception):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was pickled in this line
        if isinstance(error, MagicError) and str(again) == str(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the one that started it dies. Where there is no such kernel, nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before it was asked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
