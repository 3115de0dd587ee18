"""Server processes that tests start: ended with their context, and with this process if it is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1


class Child:
    """A running server.

    Attributes:
        pid: of the server itself.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.pid = process.pid
        self._process, self._log = process, log

    def check(self) -> None:
        """Raises RuntimeError with what it printed when it has ended."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"{self._process.args!r} ended with {code}:\n{self.output()}")

    def output(self) -> str:
        """All that it has printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


@contextlib.contextmanager
def running(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path = ROOT, keep: Sequence[int] = ()
) -> Iterator[Child]:
    """A process in `folder` with this environment and no other. It is killed at the end: what it holds is a test's.

    Call it in a thread that lives as long as the server: Linux counts the end of that thread as the parent's.

    Args:
        keep: file descriptors that it inherits.
    """
    launch = [sys.executable, "-E", "-S", __file__, str(os.getpid()), *command]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            launch, env=dict(environment), cwd=folder, pass_fds=keep, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            yield Child(process, log)
        finally:
            process.kill()
            process.wait()


def launch(parent: int, command: Sequence[str]) -> None:
    """Becomes the command, to be killed when `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this could be asked for
        sys.exit(f"process {parent} has ended")
    os.execv(command[0], list(command))


if __name__ == "__main__":
    launch(int(sys.argv[1]), sys.argv[2:])
