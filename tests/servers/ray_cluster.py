"""A real Ray cluster on loopback, by deploy/ray/node.sh: a head that executes nothing, and nodes with a device each, as Ray counts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.servers.children import ROOT, Child, running

SCRIPT = ROOT / "deploy" / "ray" / "node.sh"
_HEAD = "127.0.0.2"  # Ray takes 127.0.0.1 for another name of the machine's outer address
_READY_SECONDS = 120


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("ray", "dagster_ray"))


@dataclass
class RayCluster:
    """Nodes by their address.

    Attributes:
        environment: of every node, and so of what it executes.
        folder: for Ray's sockets and logs; its path must be short.
    """

    environment: Mapping[str, str]
    folder: Path
    port: int = field(default_factory=lambda: _free_port())
    dashboard: int = field(default_factory=lambda: _free_port())
    _nodes: dict[str, tuple[Child, contextlib.ExitStack]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where jobs are handed in."""
        return f"http://127.0.0.1:{self.dashboard}"

    def start_head(self) -> None:
        options = ["--dashboard-port", str(self.dashboard), "--temp-dir", str(self.folder)]
        self._start(_HEAD, ["head", *options])

    def start_worker(self, address: str) -> None:
        """One at a time: nodes that join together take each other's ports."""
        self._start(address, ["worker", f"{_HEAD}:{self.port}", "--num-gpus", "1", "--num-cpus", "2"])

    def kill_node(self, address: str) -> None:
        """SIGKILL to everything on a node at once, as when its machine loses power."""
        if address not in self._nodes:
            return
        child, ends = self._nodes.pop(address)
        family = _family(child.pid)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        ends.close()
        psutil.wait_procs(family, timeout=10)

    def kill_raylet(self, address: str) -> None:
        """SIGKILL to Ray's own process on a node: the cluster takes the node for lost, and what it executes goes on or not."""
        child, _ = self._nodes[address]
        [raylet] = [one for one in psutil.Process(child.pid).children() if one.name() == "raylet"]
        raylet.kill()

    def node_of(self, run: str) -> str:
        """The node that executes a Dagster run, or has executed it."""
        agent = self._ask(f"api/jobs/dagster-run-{run}")["driver_agent_http_address"]
        return str(urllib.parse.urlsplit(agent).hostname)

    def stop(self) -> None:
        for address in reversed(list(self._nodes)):
            self.kill_node(address)

    def _start(self, address: str, arguments: list[str]) -> None:
        ends = contextlib.ExitStack()
        command = ["/bin/bash", str(SCRIPT), *arguments, "--node-ip-address", address]
        own = {"MAGIC_RAY_PORT": str(self.port), "MAGIC_PYTHON": sys.executable, "PATH": os.environ["PATH"]}
        child = ends.enter_context(running(command, environment={**self.environment, **own}, folder=self.folder))
        self._nodes[address] = child, ends
        until = time.monotonic() + _READY_SECONDS
        while not self.is_alive(address):
            child.check()
            if time.monotonic() > until:
                raise TimeoutError(f"{address} is not part of the cluster after {_READY_SECONDS} s: {child.output()}")
            time.sleep(0.5)

    def is_alive(self, address: str) -> bool:
        """Whether Ray takes the node for a part of the cluster."""
        return address in self._alive()

    def _alive(self) -> set[str]:
        try:
            nodes = self._ask("nodes?view=summary")["data"]["summary"]
        except (OSError, ValueError):
            return set()
        return {node.get("ip", "") for node in nodes if node["raylet"].get("state") == "ALIVE"}

    def _ask(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.address}/{path}", timeout=10) as answer:
            content: dict[str, Any] = json.load(answer)
        return content


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _free_port() -> int:
    """Above the ports that Ray keeps for its workers, 10002 to 19999."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = int(listening.getsockname()[1])
        if port > 20000:
            return port


@contextlib.contextmanager
def running_ray(environment: Mapping[str, str], workers: Sequence[str]) -> Iterator[RayCluster]:
    """A head, and nodes at these addresses of loopback but 127.0.0.2, ended with the context."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as name:
        cluster = RayCluster(environment, Path(name))
        try:
            cluster.start_head()
            for address in workers:
                cluster.start_worker(address)
            yield cluster
        finally:
            cluster.stop()
