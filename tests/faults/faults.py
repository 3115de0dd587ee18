"""What can happen to a run, and where: real functions wrapped from outside, so that the product has no hooks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import dagster as dg

from magic_pipeline.attribution import training
from magic_pipeline.checkpoints import Store
from magic_pipeline.metagradient import walk

Strike = Literal["SIGKILL", "SIGTERM", "exception"]


def _any(*arguments: Any, **settings: Any) -> bool:
    return True


def _is_manifest(store: Store, path: str, content: Mapping[str, Any]) -> bool:
    return "/manifests/" in path or "/complete." in path


def _is_report(instance: dg.DagsterInstance, event: dg.EventLogEntry, **settings: Any) -> bool:
    return event.dagster_event is not None and event.dagster_event.is_step_materialization


@dataclass(frozen=True)
class Place:
    """A kind of moment: calls of `owner.name` that `counts` says yes to."""

    owner: Any
    name: str
    counts: Callable[..., bool] = _any


PLACES: Mapping[str, Place] = {
    "training step": Place(training, "train_step"),
    "walk step": Place(walk, "pull_back"),
    "blob": Place(Store, "write_blob"),
    "manifest": Place(Store, "create_json", _is_manifest),
    "report": Place(dg.DagsterInstance, "handle_new_event", _is_report),
}


@dataclass(frozen=True)
class Fault:
    """The n-th call at a place (from 0), struck before it or after it."""

    place: str
    strike: Strike
    n: int
    after: bool = False

    @property
    def kind(self) -> str:
        return f"{self.strike} at a {self.place}"

    def __str__(self) -> str:
        return f"{self.strike} {'after' if self.after else 'before'} {self.place} {self.n}"


def arm(fault: Fault) -> None:
    """From now on this process is struck where the fault says."""
    place = PLACES[fault.place]
    _wrap(place, lambda count, after: _strike(fault.strike) if (count, after) == (fault.n, fault.after) else None)


def count_calls(place: str) -> Callable[[], int]:
    """From now on calls at the place are counted; the function given tells how many."""
    seen: list[int] = []
    _wrap(PLACES[place], lambda count, after: seen.append(count) if after else None)
    return lambda: len(seen)


def _wrap(place: Place, at: Callable[[int, bool], None]) -> None:
    original, made = getattr(place.owner, place.name), [0]

    def wrapped(*arguments: Any, **settings: Any) -> Any:
        if not place.counts(*arguments, **settings):
            return original(*arguments, **settings)
        count = made[0]
        made[0] += 1
        at(count, False)
        result = original(*arguments, **settings)
        at(count, True)
        return result

    setattr(place.owner, place.name, wrapped)


def _strike(how: Strike) -> None:
    if how == "exception":
        raise RuntimeError("struck: the save failed")
    os.kill(os.getpid(), signal.SIGKILL if how == "SIGKILL" else signal.SIGTERM)
