"""Work in forks of a process that has imported everything and computed nothing: a process of its own in milliseconds.

A process that has computed something with torch must not be forked: its threads would not be there.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

FAILED = 70  # the exit code of work that raised


class Fork:
    """A fork that executes `work`; its result goes through JSON."""

    def __init__(self, work: Callable[[], Any], log: Path | None = None) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _execute(work, writing, log)
        os.close(writing)

    def wait_until_stopped(self) -> bool:
        """Whether it was halted (SIGSTOP); False where it ended first."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        self._status = status
        return os.WIFSTOPPED(status)

    def result(self) -> tuple[int, Any]:
        """(wait status, result) once it has ended; the result is None if it died or raised."""
        with os.fdopen(self._reading) as stream:
            content = stream.read()
        if not hasattr(self, "_status") or os.WIFSTOPPED(self._status):
            _, self._status = os.waitpid(self.pid, 0)
        return self._status, json.loads(content) if content else None


def in_a_process(work: Callable[[], Any], log: Path | None = None) -> tuple[int, Any]:
    """(wait status, result) of work in a fork of this process."""
    return Fork(work, log).result()


def _execute(work: Callable[[], Any], writing: int, log: Path | None) -> None:
    code = FAILED
    try:
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
        result = json.dumps(work())
        with os.fdopen(writing, "w") as stream:
            stream.write(result)
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        # Not sys.exit: the parent's files, handlers and atexit functions are the parent's.
        sys.stdout.flush()
        os._exit(code)


def with_its_imports(work: Callable[[], Any]) -> Callable[[], Any]:
    """Work whose result is told together with the names of the modules that it imported, for `import_here`."""

    def working() -> Any:
        before = set(sys.modules)
        result = work()
        return result, [name for name in sys.modules if name not in before]

    return working


def import_here(names: Iterable[str]) -> None:
    """Imports these modules, so that the forks to come need not: torch puts off many until it computes."""
    torch.set_num_threads(1)
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:  # a module that was put there by hand
            continue


def in_parallel(jobs: int, work: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all pieces of work, in their order, made by so many forks at a time; each may fork again.

    Raises: RuntimeError when one of the forks has failed; its message is on stderr.
    """
    forks = [Fork(functools.partial(_each, work[job::jobs])) for job in range(min(jobs, len(work)))]
    shares = [fork.result() for fork in forks]
    failed = [status for status, share in shares if share is None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(forks)} forks failed: {failed}")
    results: list[Any] = [None] * len(work)
    for job, (_, share) in enumerate(shares):
        results[job::jobs] = share
    return results


def _each(work: Sequence[Callable[[], Any]]) -> list[Any]:
    return [piece() for piece in work]


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in RAM where there is such a place: a SIGKILL loses nothing that was written, synced or not."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)
