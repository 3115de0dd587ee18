"""Some of the corruption campaign; `make faults` makes all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_no_damage_of_any_object_gives_wrong_scores_without_an_error() -> None:
    command = [sys.executable, "-m", "tests.faults.corruption", "--tries", "25", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [total] = [line.split() for line in done.stdout.splitlines() if line.startswith("all ")]
    tries, named, harmless, refused, silent = map(int, total[1:])
    assert (tries, silent) == (25, 0) and named + harmless + refused == 25 and named >= 15, done.stdout
