"""What safe checkpoints cost: saves and loads beside plain torch, memory, and a walk with and without them.

    python benchmarks/storage.py [--size-mib 1024] [--repeats 5] [--folder DIR] [--s3 s3://bucket/prefix] [--seaweedfs]
                                 [--queries 2] [--no-walk]

Saves and loads of one training state, each beside plain torch to the same place, in alternation; medians. Locally plain means
torch.save and fsync, and torch.load. On S3 it means an upload of the same bytes by s3fs, and torch.load from an s3fs file.
`--seaweedfs` starts a real SeaweedFS on loopback (needs the `servers` extra); with `--s3` endpoint and credentials come from the
environment.
Memory is what a save or load takes beside the state itself, by the kernel's high-water mark. The walk is that of
experiments/stdlib_lm.yaml, with its checkpoints at every segment beside the same walk that seals nothing but its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from magic_pipeline.checkpoints import Blob, Store

ROOT = Path(__file__).parent.parent
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write locally (a temporary folder)")
    parser.add_argument("--s3", help="an s3:// URL to write below")
    parser.add_argument("--seaweedfs", action="store_true", help="measure a SeaweedFS server started for it")
    parser.add_argument("--queries", type=int, default=2, help="queries that are walked (2)")
    parser.add_argument("--no-walk", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        state = training_state(options.size_mib * MIB)
        print(
            f"a state of {options.size_mib} MiB, largest tensor {largest(state) // MIB} MiB, torch {torch.__version__}"
        )
        print(f"{'':24} {'ours':>9} {'plain':>9} {'ratio':>7} {'extra memory':>14}")
        measure_local(folder, state, options.repeats)
        if options.s3:
            measure_s3(options.s3, {}, state, options.repeats)
        if options.seaweedfs:
            with seaweedfs(folder / "seaweedfs") as (url, settings):
                measure_s3(url, settings, state, options.repeats)
        if not options.no_walk:
            measure_walk(folder, options.queries, options.repeats)


def training_state(size: int) -> dict[str, Tensor]:
    """Parameters and two slots of a model of equal layers; `size` bytes in all."""
    layers, generator = 16, torch.Generator().manual_seed(0)
    elements = size // 4 // (3 * layers)
    return {
        f"{part}/layer{layer}": torch.randn(elements, generator=generator)
        for part in ("params", "slots/exp_avg", "slots/exp_avg_sq")
        for layer in range(layers)
    }


def measure_local(folder: Path, state: dict[str, Tensor], repeats: int) -> None:
    store, plain = Store(str(folder / "store")), folder / "plain.pt"

    def save_plain() -> None:
        with open(plain, "wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())

    compare("local", store, state, save_plain, lambda: torch.load(plain), repeats)


def measure_s3(url: str, settings: dict[str, Any], state: dict[str, Tensor], repeats: int) -> None:
    import s3fs

    plain = {name: value for name, value in settings.items() if name != "region"}
    region = {"client_kwargs": {"region_name": settings["region"]}} if "region" in settings else {}
    files = s3fs.S3FileSystem(use_listings_cache=False, **plain, **region)
    with tempfile.NamedTemporaryFile() as local:
        torch.save(state, local)
        local.flush()

        def load_plain() -> None:
            with files.open(f"{url}/plain.pt", "rb") as stream:
                torch.load(stream)

        store = Store(f"{url}/store", options=settings)
        compare("S3", store, state, lambda: files.put_file(local.name, f"{url}/plain.pt"), load_plain, repeats)


def compare(
    place: str,
    store: Store,
    state: dict[str, Tensor],
    save_plain: Callable[[], object],
    load_plain: Callable[[], object],
    repeats: int,
) -> None:
    blobs: list[Blob] = []

    def save() -> None:
        if blobs:
            store.delete(f"blobs/{blobs.pop().name}")
        blobs.append(store.write_blob("blobs", state))

    def load() -> None:
        store.read_blob("blobs", blobs[0])

    report(f"save, {place}", *side_by_side(save, save_plain, repeats), extra_memory(save))
    size = sum(tensor.nbytes for tensor in state.values())
    report(f"load, {place}", *side_by_side(load, load_plain, repeats), extra_memory(load) - size)


def side_by_side(ours: Callable[[], object], plain: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of both, after a round that is not counted."""
    ours()
    plain()
    seconds: dict[Callable[[], object], list[float]] = {ours: [], plain: []}
    for number in range(repeats):
        for work in (ours, plain) if number % 2 else (plain, ours):
            began = time.perf_counter()
            work()
            seconds[work].append(time.perf_counter() - began)
    return median(seconds[ours]), median(seconds[plain])


def extra_memory(work: Callable[[], object]) -> int:
    """Bytes by which the process grew at its largest during the work."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure_walk(folder: Path, queries: int, repeats: int) -> None:
    """A walk with a checkpoint a segment, beside one that seals its end alone."""
    experiment = load_experiment(ROOT / "experiments" / "stdlib_lm.yaml")
    opened = {}
    for name, save_every in (("every segment", "segment"), ("the end", 10**6)):
        attribution = experiment.attribution.model_copy(update={"save_every": save_every, "threads": 1, "chunk": 1})
        asked = experiment.queries.model_copy(update={"count": queries})
        changes = {"storage": str(folder / name.replace(" ", "_")), "attribution": attribution, "queries": asked}
        opened[name] = open_experiment(experiment.model_copy(update=changes))
        train(opened[name])
    # CPU seconds beside the wall's: what else the machine does in minutes of walking says nothing about checkpoints.
    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    seconds = {(name, clock): list[float]() for name in opened for clock in clocks}
    for number in range(repeats):
        for name in sorted(opened, reverse=bool(number % 2)):
            began = {clock: timer() for clock, timer in clocks.items()}
            walk_anew(opened[name])
            for clock, timer in clocks.items():
                seconds[name, clock].append(timer() - began[clock])
    for clock in clocks:
        ours, plain = seconds["every segment", clock], seconds["the end", clock]
        # Of neighbours: the machine's speed drifts by more than checkpoints take.
        ratio = median(one / other for one, other in zip(ours, plain, strict=True))
        what = f"walk, queries: {queries}, {clock}"
        print(f"{what:24} {median(ours):8.2f}s {median(plain):8.2f}s {ratio:7.3f}", flush=True)


def walk_anew(opened: OpenExperiment) -> None:
    """The walk of all queries, from the end of training, whatever was walked before."""
    for found in list(opened.store.tree(f"{opened.folder}/queries")):
        opened.store.delete(found.path)
    walk(opened, [query.key for query in opened.queries])


def report(what: str, ours: float, plain: float, memory: int) -> None:
    print(f"{what:24} {ours:8.2f}s {plain:8.2f}s {ours / plain:7.2f} {memory / MIB:10.0f} MiB", flush=True)


def largest(state: dict[str, Tensor]) -> int:
    return max(tensor.nbytes for tensor in state.values())


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A bucket of a real server, and s3fs's settings for it."""
    sys.path.insert(0, str(ROOT))
    from tests.servers.seaweedfs import running_seaweedfs

    with running_seaweedfs(folder) as server:
        yield server.bucket_url(), dict(server.options)


if __name__ == "__main__":
    main()
