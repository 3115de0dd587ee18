"""A few tries of the fault campaign; `make faults` makes all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_run_that_was_killed_and_run_again_loses_nothing() -> None:
    # A process of its own: it forks, and a process that has computed something with torch must not.
    command = [sys.executable, "-m", "tests.faults.campaign", "--quick", "--tries", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split() == ["all", "3", "3"], done.stdout
