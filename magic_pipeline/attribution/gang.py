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
import socket
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
from magic_pipeline.attribution.restoring import missing_states
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.trajectory import Trajectory, sealed_trajectory
from magic_pipeline.attribution.walking import WalkReport, walk
from magic_pipeline.checkpoints.lease import refuse_if_held
from magic_pipeline.errors import GangError, HeldError, InputError, InterruptedWalkError

logger = logging.getLogger("magic_pipeline.attribution")

_POLL = 0.2  # seconds between two looks at who has ended
_LAST_WORDS = 2.0  # seconds in which the cause of a failure may arrive after its first consequence
_END = 10.0  # seconds between asking a process to end and killing it, where it can end by itself
_END_IN_VAIN = 1.0  # and where it most likely waits for one that has failed


def train_together(
    opened: OpenExperiment, *, observe: Observe = unobserved, should_stop: ShouldStop = never
) -> Trajectory:
    """`train`, in as many processes as the experiment says. Raises as `train`, and GangError when a process dies."""
    if processes_of(opened.experiment) == 1:
        return train(opened, observe=observe, should_stop=should_stop)
    # Processes take seconds to start: none are for what is finished, or is another's.
    finished = sealed_trajectory(opened)
    if finished is not None and not missing_states(opened, finished):
        return finished
    refuse_if_held(opened.trajectory_chain)
    result: Trajectory = _Gang(opened.experiment, Job("train", ()), observe, should_stop).run()
    return result


def walk_together(
    opened: OpenExperiment, keys: Sequence[str], *, observe: Observe = unobserved, should_stop: ShouldStop = never
) -> WalkReport:
    """`walk`, in as many processes as the experiment says. Raises as `walk`, and GangError when a process dies."""
    if processes_of(opened.experiment) == 1:
        return walk(opened, keys, observe=observe, should_stop=should_stop)
    # Processes take seconds to start: none are for what is finished, or is another's.
    unfinished = [query.key for query in query_statuses(opened, keys) if not query.complete]
    if not unfinished:
        return walk(opened, keys, observe=observe, should_stop=should_stop)
    for key in unfinished:
        refuse_if_held(opened.query_chain(opened.query(key)))
    result: WalkReport = _Gang(opened.experiment, Job("walk", tuple(keys)), observe, should_stop).run()
    return result


def processes_of(experiment: Experiment) -> int:
    """How many processes the ranks run in: `processes`; auto takes the largest divisor that has a GPU, or a CPU, each.

    Raises:
        InputError: there are fewer GPUs than processes.
    """
    on_gpus = experiment.ranks > 1 and choose_device(experiment.device).type == "cuda"
    if experiment.processes != "auto":
        count = int(experiment.processes)
        if on_gpus and count > max(1, torch.cuda.device_count()):
            raise InputError(
                f"{count} processes need a GPU each, and this machine has {torch.cuda.device_count()}; "
                "take fewer, or auto: it changes no score",
                field="processes",
            )
        return count
    if on_gpus:
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
    """A process of the gang, and what it has said: `error` is when it failed (`time.monotonic()`), and of what."""

    process: subprocess.Popen[bytes]
    messages: Connection
    log: Path
    result: Any = None
    done: bool = False
    error: tuple[float, BaseException] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it has ended without a word: nothing that it said is still to be heard."""
        if self.process.poll() is None or self.done or self.error is not None:
            return False
        return self.messages.closed or not self.messages.poll()


@dataclass
class _Gang:
    experiment: Experiment
    job: Job
    observe: Observe
    should_stop: ShouldStop
    children: list[_Child] = field(default_factory=list)
    stopping_since: float | None = None

    def run(self) -> Any:
        """The leading process's result.

        Raises: the first error of any process; GangError when one died without a word, or none of them made a step for too long.
        """
        folder = Path(tempfile.mkdtemp(prefix="magic-gang-"))
        logs_tell_nothing = False
        try:
            self._start(folder)
            self._listen()
            logs_tell_nothing = True
            return self.children[0].result
        except (HeldError, InterruptedWalkError):
            logs_tell_nothing = True
            raise
        finally:
            self._end()
            if logs_tell_nothing:
                shutil.rmtree(folder, ignore_errors=True)

    def _start(self, folder: Path) -> None:
        count = processes_of(self.experiment)
        self.board = _serve_board()
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
        minutes = self.experiment.attribution.stall_timeout_minutes
        while not all(child.done for child in self.children):
            if self._hear(_POLL):
                heard = time.monotonic()
            self._pass_on_stop()
            if self._has_failed():
                raise self._cause()
            if time.monotonic() - heard > 60 * minutes:
                raise self._stalled()

    def _hear(self, seconds: float) -> bool:
        """Takes in what the processes say within so many seconds; whether there was progress."""
        progress = False
        open_pipes = {child.messages: child for child in self.children if not child.messages.closed}
        for ready in wait(list(open_pipes), seconds):
            progress |= self._take(open_pipes[ready])  # type: ignore[index]
        return progress

    def _take(self, child: _Child) -> bool:
        try:
            kind, content = child.messages.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            child.messages.close()
            return False
        if kind == "event":
            self.observe(content)
        elif kind == "log":
            level, message = content
            logger.log(level, "process %d: %s", self.children.index(child), message)
        elif kind == "result":
            child.result, child.done = content, True
        else:
            child.error = content
        return bool(kind == "event")

    def _pass_on_stop(self) -> None:
        if self.stopping_since is None and self.should_stop():
            self.stopping_since = time.monotonic()
            for child in self.children:
                self._signal(child, signal.SIGTERM)
        grace = self.experiment.attribution.stop_grace_seconds
        if self.stopping_since is not None and time.monotonic() - self.stopping_since > grace:
            raise GangError(f"the processes did not stop within {grace:g} s, and are ended; what was sealed stays")

    def _has_failed(self) -> bool:
        return any(child.error is not None or child.is_silent for child in self.children)

    def _cause(self) -> BaseException:
        """What went wrong first: a process that was killed says nothing, and the others complain about it later."""
        until = time.monotonic() + _LAST_WORDS
        while time.monotonic() < until and any(not child.done and child.error is None for child in self.children):
            if any(child.is_silent for child in self.children):
                break
            self._hear(_POLL)
        for number, child in enumerate(self.children):
            if child.is_silent:
                return self._without_a_word(number, child)
        return min((child.error for child in self.children if child.error is not None), key=lambda error: error[0])[1]

    def _without_a_word(self, number: int, child: _Child) -> BaseException:
        code = child.process.returncode
        if self.stopping_since is not None and code == -signal.SIGTERM:
            return InterruptedWalkError("stopped before it began, as asked")
        if code < 0:
            name = signal.Signals(-code).name
            return GangError(f"process {number} of the gang was ended by {name}; a rerun goes on from what is sealed")
        return GangError(f"process {number} of the gang ended with {code} and no word; its log: {child.log}")

    def _stalled(self) -> GangError:
        for child in self.children:
            self._signal(child, signal.SIGUSR1)
        time.sleep(1)
        minutes, folder = self.experiment.attribution.stall_timeout_minutes, self.children[0].log.parent
        return GangError(
            f"no process of the gang made a step for {minutes:g} minutes; all their stacks are in {folder}"
        )

    def _end(self) -> None:
        """No child is left when this returns, nor what its task has started in its session."""
        failed = self._has_failed()
        for child in self.children:
            if not child.done:
                self._signal(child, signal.SIGTERM)
        until = time.monotonic() + (_END_IN_VAIN if failed else _END)
        while time.monotonic() < until and any(child.process.poll() is None for child in self.children):
            self._overhear()
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.messages.close()

    def _overhear(self) -> None:
        """Empties the pipes, so that no process waits to be heard while it seals what it has."""
        for ready in wait([child.messages for child in self.children if not child.messages.closed], _POLL):
            try:
                ready.recv_bytes()  # type: ignore[union-attr]
            except (EOFError, OSError):
                ready.close()  # type: ignore[union-attr]

    def _signal(self, child: _Child, number: int) -> None:
        if child.process.poll() is None:
            child.process.send_signal(number)


def _serve_board() -> TCPStore:
    """The board's server, for this machine alone. It lives here, so that it outlives whichever process fails first."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(days=30),
        master_listen_fd=listening.detach(),
    )
