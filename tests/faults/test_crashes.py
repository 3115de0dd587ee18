"""Some of the crash campaign; `make faults` makes all of it, also on a real S3 server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_run_that_is_killed_at_any_durable_operation_and_resumed_gives_the_same_bits_and_repeats_nothing_sealed() -> (
    None
):
    # A process of its own: it forks, and a process that has computed something with torch must not.
    command = [sys.executable, "-m", "tests.faults.crashes", "--stride", "12", "--doubles", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    fault, tries, survived = done.stdout.splitlines()[-1].split()
    assert fault == "all" and tries == survived and int(tries) >= 20, done.stdout
