"""Speed and time left, from a monotonic clock."""

from __future__ import annotations

import time


class Pace:
    """Steps per second since it was made, and the seconds that the rest takes at that pace."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._done = 0

    def step(self, left: int) -> tuple[float, float]:
        """One more step is made and `left` remain: (steps per second, seconds left)."""
        self._done += 1
        elapsed = max(time.monotonic() - self._began, 1e-9)
        return self._done / elapsed, left * elapsed / self._done

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began
