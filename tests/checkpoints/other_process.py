"""Another process at the same storage: `python -m tests.checkpoints.other_process JOB`, and what to do as JSON lines on stdin.

The first line is {"url": ..., "options": {...}}, so that no secret stands on a command line; "ready" on stdout answers it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from magic_pipeline.checkpoints import Store
from magic_pipeline.errors import ObjectExistsError

ROOT = Path(__file__).parents[2]
MIB = 2**20


class Other:
    """The process, seen from the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, what: Any) -> None:
        """Hands it a line, without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """Its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(10)}"
        return json.loads(line)


@contextlib.contextmanager
def other_process(job: str, url: str, options: Mapping[str, Any]) -> Iterator[Other]:
    """A process that has opened the storage and waits for work."""
    command = [sys.executable, "-m", "tests.checkpoints.other_process", job]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        other = Other(process)
        try:
            other.tell({"url": url, "options": dict(options)})
            assert other.hear() == "ready"
            yield other
        finally:
            process.kill()


def create(store: Store, told: Mapping[str, Any]) -> list[str]:
    """Creates each name create-only; the names that it was the first at."""
    won = []
    for path in told["paths"]:
        try:
            store.create_json(path, {"by": told["by"]})
            won.append(path)
        except ObjectExistsError:
            pass
    return won


def die_while_writing(store: Store, told: Mapping[str, Any]) -> None:
    """Is killed after most of a large object has been written."""

    def write(stream: BinaryIO) -> None:
        for _ in range(20):  # noqa: FURB122 - a sink's stream has `write` and no more
            stream.write(os.urandom(MIB))
        os.kill(os.getpid(), signal.SIGKILL)

    store.sink.publish(told["path"], write, exclusive=True)


def list_folder(store: Store, told: Mapping[str, Any]) -> list[str]:
    """What the store lists."""
    return store.list(told["folder"])


JOBS: dict[str, Callable[[Store, Mapping[str, Any]], Any]] = {
    job.__name__: job for job in (create, die_while_writing, list_folder)
}


def main(job: str) -> None:
    place = json.loads(sys.stdin.readline())
    store = Store(place["url"], options=place["options"])
    store.list("nothing")  # connects
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(JOBS[job](store, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
