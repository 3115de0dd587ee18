"""Some of the campaign on halted processes; `make faults` makes more of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_process_that_sleeps_through_a_take_over_corrupts_and_confuses_nothing_when_it_wakes() -> None:
    # A process of its own: it forks, and a process that has computed something with torch must not.
    command = [sys.executable, "-m", "tests.faults.zombies", "--stride", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    fault, tries, survived = done.stdout.splitlines()[-1].split()
    assert fault == "all" and tries == survived and int(tries) >= 8, done.stdout
