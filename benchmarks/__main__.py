"""All tables, one after the other, into benchmarks/RESULTS.md, with the machine and the versions that they were measured on.

    python -m benchmarks [--only NAME ...] [--output benchmarks/RESULTS.md]

Each table is a script that can be run alone with settings of its own. A table is ended at its time limit; what it printed until then is
kept, and the page says so. With --only the other tables of the page stay as they are.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

HERE = Path(__file__).parent
HEAD = """# What it costs, measured

Written by `python -m benchmarks` (`make bench`); each table says how, when and on what it was measured. Other work on the machine
disturbs: the load average is of the minute before and after (1 is one CPU busy), and ratios are of CPU time of this process in
alternation where a script says so. What the rows mean is at the top of each script.
"""


@dataclass(frozen=True)
class Table:
    """A script with its arguments, and the minutes after which it is ended."""

    title: str
    command: tuple[str, ...]
    minutes: float


TABLES: Mapping[str, Table] = {
    "walk": Table("What a walk costs per step and query, in training steps", ("walk.py",), 4),
    "storage": Table("What safe checkpoints cost", ("storage.py", "--size-mib", "256", "--repeats", "3"), 4),
    "ranks": Table("What ranks cost and save", ("ranks.py", "--processes", "1", "2"), 2),
    "retrain": Table("Batched against one-by-one retraining", ("retrain.py", "--repeats", "3"), 3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=TABLES, default=list(TABLES), help=", ".join(TABLES)
    )
    parser.add_argument("--output", type=Path, default=HERE / "RESULTS.md")
    options = parser.parse_args()
    failed = []
    for name in options.only:
        section, whole = measured(name, TABLES[name])
        if not whole:
            failed.append(name)
        # At once, so that what is measured is not lost with what comes after it.
        options.output.write_text(page(sections(options.output) | {name: section}))
    print(f"\n{options.output}" + (f"; not whole: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def measured(name: str, table: Table) -> tuple[str, bool]:
    """The table's section of the page, and whether the script came to its end."""
    print(f"\n== {name}: {table.title}", flush=True)
    load, began = os.getloadavg()[0], time.time()
    output, ending = run(table)
    seconds = time.time() - began
    day = time.strftime("%Y-%m-%d %H:%M", time.gmtime(began))
    note = "" if ending is None else f"\n\n**Not whole**: the script {ending}."
    shown = " ".join(["python", f"benchmarks/{table.command[0]}", *table.command[1:]])
    text = (
        f"## {name}: {table.title}\n\n`{shown}`: {day} UTC, {seconds:.0f} s, {revision()}. {machine()}; load {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after. {versions()}.{note}\n\n```text\n{output.rstrip()}\n```\n"
    )
    return text, ending is None


def run(table: Table) -> tuple[str, str | None]:
    """What the script printed, and how it ended where that was not well."""
    script, *arguments = table.command
    process = subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdout=subprocess.PIPE, text=True, cwd=HERE.parent, start_new_session=True,
    )  # fmt: skip
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)  # and the processes that the script has started

    timer = threading.Timer(60 * table.minutes, end)
    timer.start()
    lines = []
    try:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
        code = process.wait()
    finally:
        timer.cancel()
    if late.is_set():
        return "".join(lines), f"was ended after {table.minutes:g} minutes"
    return "".join(lines), f"failed with exit code {code}" if code else None


def sections(path: Path) -> dict[str, str]:
    """The sections of an existing page by their tables' names."""
    parts = re.split(r"^(?=## )", path.read_text(), flags=re.MULTILINE)[1:] if path.exists() else []
    return {part[3:].partition(":")[0]: part for part in parts}


def page(found: Mapping[str, str]) -> str:
    """All sections in the order of the tables; those of tables that are no more are left out."""
    return "\n".join([HEAD, *(found[name].rstrip() + "\n" for name in TABLES if name in found)])


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{model}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"


def versions() -> str:
    packages = ("torch", "numpy", "transformers", "dagster", "fsspec")
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{package} {version(package)}" for package in packages)]
    )


def revision() -> str:
    """The commit that is checked out."""
    asked = ["git", "describe", "--always", "--dirty=, with changes", "--exclude=*"]
    found = subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=False)
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "no git commit"


if __name__ == "__main__":
    sys.exit(main())
