"""Some of the campaign on leave-out banks; `make faults` makes all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_bank_that_is_killed_at_any_durable_operation_and_resumed_has_the_same_bits_and_repeats_nothing() -> None:
    # A process of its own: it forks, and a process that has computed something with torch must not.
    command = [sys.executable, "-m", "tests.faults.banks", "--stride", "17", "--doubles", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    fault, tries, survived = done.stdout.splitlines()[-1].split()
    assert fault == "all" and tries == survived and int(tries) >= 7, done.stdout
