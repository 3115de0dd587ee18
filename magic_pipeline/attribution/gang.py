"""Starts the processes of a gang, listens to them, and ends them: all together, or all of them when one fails.

This process takes no part in the work. It hears events, log lines, results and errors of its children over pipes, gives the first
error as its own, and sees to it that none of them outlives it (each asks the kernel to be killed when its parent dies).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.observing import Observe, ShouldStop, never, unobserved
from magic_pipeline.attribution.opening import OpenExperiment, choose_device
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.trajectory import Trajectory
from magic_pipeline.attribution.walking import WalkReport, walk
from magic_pipeline.errors import GangError

logger = logging.getLogger("magic_pipeline.attribution")

_POLL = 0.2  # seconds between two looks at who has ended
_LAST_WORDS = 2.0  # seconds in which the cause of a failure may arrive after its first consequence
_END = 10.0  # seconds between asking a process to end and killing it


def train_together(
    opened: OpenExperiment, *, observe: Observe = unobserved, should_stop: ShouldStop = never
) -> Trajectory:
    """`train`, in as many processes as the experiment says. Raises as `train`, and GangError when a process dies."""
    if processes_of(opened.experiment) == 1:
        return train(opened, observe=observe, should_stop=should_stop)
    result: Trajectory = _Gang(opened.experiment, Job("train", ()), observe, should_stop).run()
    return result


def walk_together(
    opened: OpenExperiment, keys: Sequence[str], *, observe: Observe = unobserved, should_stop: ShouldStop = never
) -> WalkReport:
    """`walk`, in as many processes as the experiment says. Raises as `walk`, and GangError when a process dies."""
    if processes_of(opened.experiment) == 1:
        return walk(opened, keys, observe=observe, should_stop=should_stop)
    result: WalkReport = _Gang(opened.experiment, Job("walk", tuple(keys)), observe, should_stop).run()
    return result


def processes_of(experiment: Experiment) -> int:
    """How many processes the ranks run in: `processes`; auto takes the largest divisor that has a GPU, or a CPU, each."""
    if experiment.processes != "auto":
        return int(experiment.processes)
    if choose_device(experiment.device).type == "cuda":
        most = torch.cuda.device_count()
    else:
        most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(
        count for count in range(1, experiment.ranks + 1) if experiment.ranks % count == 0 and count <= max(1, most)
    )


@dataclass(frozen=True)
class Job:
    """What a gang does: `train`, or `walk` for these queries."""

    work: str
    keys: tuple[str, ...]


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    messages: Connection
    log: Path
    result: Any = None
    done: bool = False


@dataclass
class _Gang:
    experiment: Experiment
    job: Job
    observe: Observe
    should_stop: ShouldStop
    children: list[_Child] = field(default_factory=list)
    stopping_since: float | None = None
    errors: list[tuple[int, BaseException]] = field(default_factory=list)

    def run(self) -> Any:
        """The leading process's result.

        Raises: the first error of any process; GangError when one died without a word, or none of them made a step for too long.
        """
        folder = Path(tempfile.mkdtemp(prefix="magic-gang-"))
        keep = True
        try:
            self._start(folder)
            self._listen()
            keep = False
            return self.children[0].result
        finally:
            self._end()
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

    def _start(self, folder: Path) -> None:
        count = processes_of(self.experiment)
        # The board lives here, so that it outlives whichever process fails first.
        self.board = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(days=30))
        content = pickle.dumps((self.experiment, self.job))
        for number in range(count):
            reading, writing = Pipe(duplex=False)
            log = folder / f"process{number}.log"
            arguments = [str(n) for n in (os.getpid(), self.board.port, number, count, writing.fileno())]
            with open(log, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "magic_pipeline.attribution.rank_process", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writing.fileno()],
                    start_new_session=True,  # an interrupt from the keyboard is this process's to pass on
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                )
            writing.close()
            self.children.append(_Child(process, reading, log))
            with contextlib.suppress(BrokenPipeError), process.stdin or contextlib.nullcontext() as stdin:
                if stdin is not None:
                    stdin.write(content)
        logger.info("%d processes for %d ranks; their logs: %s", count, self.experiment.ranks, folder)

    def _listen(self) -> None:
        heard = time.monotonic()
        settings = self.experiment.attribution
        while not all(child.done for child in self.children):
            if self._hear(_POLL):
                heard = time.monotonic()
            self._pass_on_stop()
            if self.errors or self._dead():
                raise self._cause()
            if time.monotonic() - heard > 60 * settings.stall_timeout_minutes:
                self.errors.append((0, self._stalled()))
                raise self.errors[0][1]

    def _hear(self, seconds: float) -> bool:
        """Takes in what the processes say within so many seconds; whether there was progress."""
        progress = False
        open_pipes = {child.messages: number for number, child in enumerate(self.children) if not child.messages.closed}
        for ready in wait(list(open_pipes), seconds):
            number = open_pipes[ready]  # type: ignore[index]
            progress |= self._take(number, self.children[number])
        return progress

    def _take(self, number: int, child: _Child) -> bool:
        try:
            kind, content = child.messages.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            child.messages.close()
            return False
        if kind == "event":
            self.observe(content)
        elif kind == "log":
            level, message = content
            logger.log(level, "process %d: %s", number, message)
        elif kind == "result":
            child.result, child.done = content, True
        else:
            self.errors.append((number, content))
        return bool(kind == "event")

    def _pass_on_stop(self) -> None:
        if self.stopping_since is None and self.should_stop():
            self.stopping_since = time.monotonic()
            for child in self.children:
                self._signal(child, signal.SIGTERM)
        grace = self.experiment.attribution.stop_grace_seconds
        if self.stopping_since is not None and time.monotonic() - self.stopping_since > grace:
            raise GangError(f"the processes did not stop within {grace:g} s, and are ended; what was sealed stays")

    def _dead(self) -> bool:
        return any(not child.done and child.process.poll() is not None for child in self.children)

    def _cause(self) -> BaseException:
        """What went wrong first: a process that was killed says nothing, and the others complain about it."""
        until = time.monotonic() + _LAST_WORDS
        while time.monotonic() < until and any(not child.messages.closed for child in self.children):
            self._hear(_POLL)
            if any(_killed(child) for child in self.children):
                break
        for number, child in enumerate(self.children):
            if _killed(child) and number not in dict(self.errors):
                name = signal.Signals(-child.process.returncode).name
                return GangError(
                    f"process {number} of the gang was ended by {name}; a rerun goes on from what is sealed"
                )
        if self.errors:
            return self.errors[0][1]
        number, child = next((n, c) for n, c in enumerate(self.children) if not c.done and c.process.poll() is not None)
        return GangError(
            f"process {number} of the gang ended with {child.process.returncode} and no word; its log: {child.log}"
        )

    def _stalled(self) -> GangError:
        for child in self.children:
            self._signal(child, signal.SIGUSR1)
        time.sleep(1)
        minutes, folder = self.experiment.attribution.stall_timeout_minutes, self.children[0].log.parent
        return GangError(
            f"no process of the gang made a step for {minutes:g} minutes; all their stacks are in {folder}"
        )

    def _end(self) -> None:
        """No child is left when this returns."""
        for child in self.children:
            if not child.done:
                self._signal(child, signal.SIGTERM)
        until = time.monotonic() + (_END if not self.errors else 1.0)
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))
            self._signal(child, signal.SIGKILL)
            child.process.wait()
            child.messages.close()

    def _signal(self, child: _Child, number: int) -> None:
        if child.process.poll() is None:
            child.process.send_signal(number)


def _killed(child: _Child) -> bool:
    return (child.process.poll() or 0) < 0
