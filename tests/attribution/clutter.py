"""What dead writers leave behind, made by the same doors as they use; and how to look at all of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import write_score_matrix
from magic_pipeline.attribution.sealed_files import read_manifest, seal_file
from magic_pipeline.checkpoints import Chain, Holder, Lease
from magic_pipeline.checkpoints.heartbeat import let_go
from magic_pipeline.checkpoints.s3_sink import S3Sink

ROOT = Path(__file__).parents[2]
TENSORS = {"x": torch.arange(4.0)}


def ended_process() -> Holder:
    """A process of this machine that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return replace(Holder.this_process(), pid=process.pid, started="ticks:1", heartbeat="0123456789abcdef")


def tree(opened: OpenExperiment) -> dict[str, int]:
    """Path -> size of everything below the experiment's folder, unfinished publications among it."""
    sink, folder = opened.store.sink, opened.experiment.storage_folder
    unfinished = {f"{found.path} (unfinished)": found.size for found in sink.unfinished_tree(folder)}
    return {found.path: found.size for found in sink.tree(folder)} | unfinished


def leave_segments(chain: Chain, holder: Holder) -> None:
    """As if a process had been killed after it completed the chain, and before it cleared the last two segments."""
    complete = chain.completed({})
    assert complete is not None
    lease = chain.take(holder)
    for step in (2, 4):
        lease.seal(step, {"rank0": TENSORS}, complete.facts)
    _die(lease)


def leave_blob(chain: Chain, holder: Holder) -> str:
    """As if a process had been killed between a blob and its manifest. The blob's path."""
    lease = chain.take(holder)
    blob = chain.store.write_blob(chain.blobs, TENSORS, prefix=f"e{lease.epoch:08d}-")
    _die(lease)
    return f"{chain.blobs}/{blob.name}"


def _die(lease: Lease) -> None:
    """This process stands for the dead one: it must not go on giving signs of life in its name."""
    if lease._heartbeat is not None:
        let_go(lease._heartbeat)
        lease._heartbeat = None


def leave_heartbeat(opened: OpenExperiment, holder: Holder) -> str:
    """As if a process had been killed while it held any lease."""
    path = f"{opened.layout.writers}/{holder.heartbeat}.json"
    opened.store.replace_json(path, {"beats": 7, "holder": holder.as_json()})
    return path


def leave_scores(opened: OpenExperiment, folder: Path) -> None:
    """A second copy of a sheet, a blob of one that was never sealed, and a matrix of one query only."""
    sheets = opened.store.list(f"{opened.layout.scores}/manifests")
    sheet = read_manifest(opened.store, opened.layout.scores, sheets[0])
    file = folder / "again.parquet"
    opened.store.fetch_file(f"{sheet.folder}/blobs", sheet.blob, file)
    seal_file(opened.store, opened.layout.scores, sheets[0].rpartition(".e")[0], file, sheet.facts)
    opened.store.write_file(f"{opened.layout.scores}/blobs", file, ".parquet")
    write_score_matrix(opened)
    seal_file(opened.store, opened.layout.matrix, "0123456789abcdef", file, {"digest": "", "rows": 1, "queries": []})


def leave_unfinished(opened: OpenExperiment, path: str) -> None:
    """As if a process had been killed in the middle of publishing an object of this name; nothing where that leaves nothing."""
    sink = opened.store.sink
    if isinstance(sink, S3Sink):
        sink.call("create_multipart_upload", path, Key=sink.key(path))
    elif Path(opened.store.url).is_dir():
        folder, _, name = path.rpartition("/")
        partial = Path(opened.store.url, folder, f".{name}.0123456789abcdef.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(b"half")


def clutter(opened: OpenExperiment, folder: Path) -> None:
    """All of it, around a finished experiment."""
    dead = ended_process()
    first, second, _ = opened.queries
    leave_segments(opened.query_chain(first), dead)
    leave_blob(opened.query_chain(second), dead)
    leave_blob(opened.trajectory_chain, dead)
    leave_heartbeat(opened, dead)
    leave_scores(opened, folder)
    leave_unfinished(opened, f"{opened.query_chain(second).blobs}/e{1:08d}-{'0' * 32}.pt")
    leave_unfinished(opened, f"{opened.layout.scores}/blobs/{'0' * 32}.parquet")


HOLD = """
import sys, time
from pathlib import Path
from magic_pipeline.checkpoints import Chain, Store
url, folder, writers = sys.argv[1:]
chain = Chain(Store(url), folder, writers=writers)
lease = chain.take()
blob = chain.store.write_file(chain.blobs, Path(sys.executable).parent / "python", ".pt", prefix=f"e{lease.epoch:08d}-")
print(f"{chain.blobs}/{blob.name}", flush=True)
time.sleep(100)
"""


@contextmanager
def writer_at_work(chain: Chain) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A live process that holds a chain on a local disk, and a blob of it that is not sealed yet."""
    command = [sys.executable, "-c", HOLD, chain.store.url, chain.folder, str(chain.writers)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


KILLED = """
import os, signal, sys
from magic_pipeline import cli
from magic_pipeline.checkpoints import Store
count, n, delete = 0, int(sys.argv[1]), Store.delete
def killed_at_n(store, path):
    global count
    if count == n:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    delete(store, path)
Store.delete = killed_at_n
assert cli.main(sys.argv[2:]) == 0
print(count)
"""


def killed_at_deletion(n: int, *command: Any) -> int | None:
    """A process of the command line, killed instead of its n-th deletion (from 0). How many it made; None when it was killed."""
    arguments = [sys.executable, "-c", KILLED, str(n), *map(str, command)]
    process = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode == -signal.SIGKILL:
        return None
    assert process.returncode == 0, process.stderr
    return int(process.stdout.splitlines()[-1])


def in_a_bare_process(code: str, *arguments: Any) -> str:
    """What a process prints that has imported nothing yet."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
