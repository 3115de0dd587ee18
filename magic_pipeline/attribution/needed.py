"""Which sealed checkpoints of a training are still needed: the rules by which `gc` keeps and frees. Reads; changes nothing.

What is kept was read back, every byte, before anything that it replaces is called unneeded. A walk that is not finished keeps its
two newest checkpoints; a finished one keeps its last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from magic_pipeline.checkpoints.chain import (
    UNUSABLE,
    Chain,
    Checkpoint,
    ForeignError,
    SealedName,
    by_age,
    check_facts,
)
from magic_pipeline.checkpoints.garbage import Reason
from magic_pipeline.errors import DamagedObjectError, MissingObjectError

LEFTOVER = Reason("leftover", "the work is finished, and only its result is read")
SUPERSEDED = Reason("superseded", "a newer whole one is there")
DAMAGED = Reason("damaged", "it cannot be used, and a whole one is there")
OTHER_TRAJECTORY = Reason("foreign", "it belongs to another trajectory than the sealed one, and is never used")
TRAJECTORY = Reason("trajectory", "every query is finished; a new one makes the states again by training")

GENERATIONS = 2

Condition = Literal["whole", "damaged", "of another trajectory", "of other work"]
Unneeded = dict[SealedName, Reason]


class Judge:
    """Reads checkpoints back, each only once: what is sealed never changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, SealedName], Condition] = {}

    def of_walk(self, chain: Chain, expect: Mapping[str, Any], complete: Checkpoint | None) -> Unneeded:
        """A query's walk over the sealed trajectory."""
        if complete is not None:
            return _all_but(chain, complete, chain.sealed())
        unneeded, whole = Unneeded(), set[int]()
        for name in by_age(chain.sealed(), "lowest"):
            if len(whole) == GENERATIONS:
                unneeded[name] = SUPERSEDED
                continue
            condition = self.condition(chain, name, expect)
            if condition == "whole" and name.step not in whole:
                whole.add(name.step)
            elif condition == "whole":
                unneeded[name] = SUPERSEDED
            elif condition == "damaged" and whole:
                unneeded[name] = DAMAGED
            elif condition == "of another trajectory":
                unneeded[name] = OTHER_TRAJECTORY
        return unneeded

    def of_finished_training(self, chain: Chain, complete: Checkpoint, *, free_states: bool) -> Unneeded:
        """Its states at the boundaries, unless they are to be freed too. A damaged one is made again by the next walk."""
        if free_states:
            return _all_but(chain, complete, chain.sealed(), TRAJECTORY)
        training, states = {"training": complete.facts["training"]}, dict(_states(complete))
        unneeded = _all_but(chain, complete, [name for name in chain.sealed() if name.step not in states])
        whole = set[int]()
        for name in (name for name in by_age(chain.sealed(), "highest") if name.step in states):
            if name.step in whole:
                unneeded[name] = SUPERSEDED
                continue
            condition = self.condition(chain, name, training | {"state": states[name.step]})
            if condition == "whole":
                whole.add(name.step)
            elif condition == "damaged":
                unneeded[name] = DAMAGED
            elif condition == "of another trajectory":
                unneeded[name] = OTHER_TRAJECTORY
        return unneeded

    def of_unfinished_training(self, chain: Chain, expect: Mapping[str, Any]) -> Unneeded:
        """Its whole states, each once: they are the trajectory to be."""
        unneeded, whole = Unneeded(), set[int]()
        for name in by_age(chain.sealed(), "highest"):
            condition = self.condition(chain, name, expect)
            if condition == "whole" and name.step not in whole:
                whole.add(name.step)
            elif condition == "whole":
                unneeded[name] = SUPERSEDED
            elif condition == "damaged" and whole:
                unneeded[name] = DAMAGED
        return unneeded

    def condition(self, chain: Chain, name: SealedName, expect: Mapping[str, Any]) -> Condition:
        """What a checkpoint is worth for work with these facts. Raises StorageError when it cannot be read."""
        known = self._known.get((chain.folder, name))
        if known is None:
            known = self._known[chain.folder, name] = _condition(chain, name, expect)
        return known


def _condition(chain: Chain, name: SealedName, expect: Mapping[str, Any]) -> Condition:
    try:
        facts = chain.manifest(name).facts
        check_facts(facts, {key: value for key, value in expect.items() if key in ("training", "query")})
    except ForeignError:
        return "of other work"
    except (MissingObjectError, DamagedObjectError):
        return "damaged"
    try:
        check_facts(facts, expect)
    except ForeignError:
        return "of another trajectory"
    try:
        chain.verified(name)
    except UNUSABLE:
        return "damaged"
    return "whole"


def _all_but(chain: Chain, complete: Checkpoint, names: Iterable[SealedName], reason: Reason = LEFTOVER) -> Unneeded:
    """The names, oldest first, and all ends of the work but this one."""
    ends = [name for name in chain.completions() if name.epoch != complete.epoch]
    return dict.fromkeys(reversed(by_age(names, "highest")), reason) | dict.fromkeys(ends, SUPERSEDED)


def _states(complete: Checkpoint) -> Iterable[tuple[int, str]]:
    """(step, digest of the content) of the states that a finished trajectory is made of."""
    return zip(complete.facts["boundaries"], complete.facts["state_digests"], strict=True)
