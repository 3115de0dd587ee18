"""One process of a gang, started by gang.py alone.

`python -m magic_pipeline.attribution.rank_process PARENT PORT PROCESS PROCESSES PIPE`: it reads its job from standard input and says
over the pipe what happens. Whatever takes long to import is imported once it hears signals and can say what goes wrong.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from magic_pipeline.checkpoints.holder import die_with
from magic_pipeline.errors import InterruptedWalkError, MagicError

if TYPE_CHECKING:
    from magic_pipeline.attribution.experiment import Experiment
    from magic_pipeline.attribution.gang import Job

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def main(arguments: list[str]) -> int:
    parent, port, process, processes, pipe = map(int, arguments)
    die_with(parent)
    messages = _Messages(Connection(pipe, readable=False))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to pass on
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.getLogger("magic_pipeline").addHandler(_Forward(messages))
    logging.getLogger("magic_pipeline").setLevel(logging.INFO)
    try:
        experiment, job = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
        messages.send("result", _work(experiment, job, messages, stop, port, process, processes))
        return 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        # The clock is the machine's: by it the parent knows the cause from its consequences in the other processes.
        messages.send("error", (time.monotonic(), _portable(error, process)))
        if not isinstance(error, MagicError):
            traceback.print_exception(error)
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
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from magic_pipeline.attribution.board import StoreBoard
    from magic_pipeline.attribution.opening import choose_device, open_experiment
    from magic_pipeline.attribution.training import train
    from magic_pipeline.attribution.walking import walk
    from magic_pipeline.metagradient.processes import ProcessGang

    if stop.is_set():
        raise InterruptedWalkError("stopped before it began, as asked")
    on_gpus = choose_device(experiment.device).type == "cuda"
    if on_gpus:
        torch.cuda.set_device(process)
    elif sys.platform in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])  # all are on this machine
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(days=30))
    board = StoreBoard(PrefixStore("board", store), process, processes)
    # Imports and loading may take one process much longer than another, and no collective waits for that.
    board.collect(None)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=PrefixStore("numbers", store.clone()),  # type: ignore[attr-defined] # its stub does not know it
        rank=process,
        world_size=processes,
        timeout=timedelta(minutes=experiment.attribution.collective_timeout_minutes),
    )
    opened = open_experiment(experiment, gang=ProcessGang(), board=board)
    if job.work == "train":
        result: Any = train(opened, observe=messages.event, should_stop=stop.is_set)
    else:
        result = walk(opened, job.keys, observe=messages.event, should_stop=stop.is_set)
    # All have done what they had to do before anybody hangs up.
    board.collect(None)
    dist.destroy_process_group()
    return result


class _Messages:
    """What the parent hears; from any thread of this process, and from no fork of it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock, self._pid = connection, threading.Lock(), os.getpid()

    def send(self, kind: str, content: Any) -> None:
        if os.getpid() != self._pid:
            return
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


def _portable(error: BaseException, process: int) -> Exception:
    """The error as it crosses the pipe: itself where the parent has its class too, else its class's name and message."""
    known = isinstance(error, Exception) and type(error).__module__.partition(".")[0] in ("builtins", "magic_pipeline")
    told = error if isinstance(error, Exception) and known else RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, MagicError):
        told.add_note(f"In process {process} of the gang:\n{''.join(traceback.format_exception(error))}")
    with suppress(Exception):
        again = pickle.loads(pickle.dumps(told))  # noqa: S301 - what was pickled in this line
        if type(again) is type(told) and str(again) == str(told):
            return told
    return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: no thread that the task has left keeps the process.
    os._exit(code)
