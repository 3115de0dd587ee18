"""Does another device give the same scores? The same small experiment on each, scores compared query by query.

    python benchmarks/devices.py [--experiment experiments/digits.yaml] [--devices cpu cuda] [--queries 4] [--processes 1]

Exit 0 when all agree with the first within `--tolerance` of a query's largest score (float32), 1 otherwise, 2 where a device is not
there. With `--processes` above 1 the ranks run in that many processes (NCCL between GPUs, gloo between CPUs).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.gang import train_together, walk_together
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.scores import read_scores, write_scores

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, default=ROOT / "experiments" / "digits.yaml")
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    options = parser.parse_args()
    if "cuda" in options.devices and not torch.cuda.is_available():
        print("torch finds no GPU here", file=sys.stderr)
        return 2
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, device in enumerate(options.devices):
            found[f"{device} {number}"] = scores_on(device, Path(folder) / str(number), options)
    first, *others = found
    worst = 0.0
    for other in others:
        largest = np.abs(found[first]).max(0)
        off = (np.abs(found[other] - found[first]) / largest).max()
        worst = max(worst, float(off))
        print(
            f"{other} against {first}: at most {off:.2e} of a query's largest score off (tolerance {options.tolerance:g})"
        )
    return 0 if worst <= options.tolerance else 1


def scores_on(device: str, folder: Path, options: argparse.Namespace) -> np.ndarray:
    """`[units, queries]`."""
    changes = {"device": device, "storage": str(folder), "ranks": options.processes, "processes": options.processes}
    opened = open_experiment(load_experiment(options.experiment).model_copy(update=changes))
    keys = [query.key for query in opened.queries][: options.queries]
    began = time.perf_counter()
    train_together(opened)
    trained = time.perf_counter()
    walk_together(opened, keys)
    print(
        f"{device}: training {trained - began:.1f} s, walk of {len(keys)} queries {time.perf_counter() - trained:.1f} s",
        flush=True,
    )
    for key in keys:
        write_scores(opened, key)
    return np.stack([read_scores(opened, key).scores for key in keys], axis=1)


if __name__ == "__main__":
    sys.exit(main())
