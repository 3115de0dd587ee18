"""Some of the campaign on gangs; `make faults` makes more of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_gangs_that_are_struck_and_run_again_give_the_bits_of_one_process() -> None:
    # A process of its own: it forks, and a process that has computed something with torch must not.
    command = [sys.executable, "-m", "tests.faults.gangs", "--tries", "4", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[:3] == ["all", "4", "4"], done.stdout
