"""The real UI: `magic-pipeline ui` as a process, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def served(folder: Path, log: Path) -> Iterator[str]:
    """`magic-pipeline ui` on a free port; gives its address. Every process of it is ended afterwards."""
    port = _free_port()
    command = [sys.executable, "-m", "magic_pipeline.cli", "ui", str(folder), "--port", str(port)]
    with log.open("wb") as output:
        # A session of its own, so that webserver, daemon and code server can be ended together.
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            _wait_until_it_answers(f"http://127.0.0.1:{port}/server_info", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


def ask(address: str, query: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The data of a GraphQL request, as the UI's pages make it.

    Raises:
        AssertionError: the request is answered with errors.
    """
    body = json.dumps({"query": query, "variables": dict(variables or {})}).encode()
    request = urllib.request.Request(f"{address}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = json.load(answer)
    assert "errors" not in content, content["errors"]
    data: dict[str, Any] = content["data"]
    return data


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_answers(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the UI does not answer at {address}: {log.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    # The group outlives its leader where a child ignored the signal.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
