"""The tables that campaigns end with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Try:
    """One fault and what came after it: `problems` is empty where nothing was lost.

    Attributes:
        kind: the row of the table that it counts in.
    """

    kind: str
    fault: str
    problems: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.fault} ({self.seconds:.1f} s): {'; '.join(self.problems) or 'nothing lost'}"


def table(tries: Sequence[Try]) -> str:
    """`fault, tries, survived`: one row a kind, and one for all."""
    made = Counter(one.kind for one in tries)
    survived = Counter(one.kind for one in tries if not one.problems)
    width = max(map(len, [*made, "all"]))
    lines = [f"{'fault':{width}}  tries  survived"]
    lines += [f"{kind:{width}}  {count:5}  {survived[kind]:8}" for kind, count in made.items()]
    return "\n".join([*lines, f"{'all':{width}}  {made.total():5}  {survived.total():8}"])
