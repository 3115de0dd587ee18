"""The walk plan: everything that decides a walk's bits, sealed when a query first starts and kept whatever settings say later.

A plan is shared by a *cohort* of queries that are walked together, each in its own lane. It lies beside each of them, create-only,
and every checkpoint of the walk carries it too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from magic_pipeline.attribution.layout import Layout
from magic_pipeline.checkpoints.digests import fingerprint
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import DamagedObjectError, MissingObjectError, ObjectExistsError

logger = logging.getLogger("magic_pipeline.attribution")


@dataclass(frozen=True)
class WalkPlan:
    """How a cohort is walked.

    Attributes:
        cohort: the partition keys of its queries; a query's lane is its position.
        lanes: width of the cotangents, a multiple of `chunk`.
        chunk: lanes per batched pullback.
        boundaries: the trajectory's, ascending.
        save_steps: where the walk is sealed, descending, 0 last.
        hold: states held while a segment is rematerialised; None holds all.
        microbatch_size: as in training; None takes the whole batch.
        threads: CPU threads.
        device: kind of device.
        versions: of the libraries.
        engine: what pulls shards back: eager, or compiled where their form is one of `forms` (metagradient/compiled.py).
    """

    cohort: tuple[str, ...]
    lanes: int
    chunk: int
    boundaries: tuple[int, ...]
    save_steps: tuple[int, ...]
    hold: int | None
    microbatch_size: int | None
    threads: int
    device: str
    versions: Mapping[str, str]
    engine: str = "eager"
    forms: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"versions": dict(self.versions)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> WalkPlan:
        """Raises TypeError or KeyError where the content is no plan's."""
        fields = dict(content)
        for name in ("cohort", "boundaries", "save_steps", "forms"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)

    @cached_property
    def digest(self) -> str:
        return fingerprint(self.as_dict())

    def lane(self, key: str) -> int:
        """The query's lane. Raises ValueError where it is not of this cohort."""
        if key not in self.cohort:
            raise ValueError(f"it is of other work: {key} is not in its cohort {', '.join(self.cohort)}")
        return self.cohort.index(key)


def seal_plan(store: Store, layout: Layout, key: str, query_digest: str, trajectory: str, plan: WalkPlan) -> None:
    """Seals a query's plan beside its walk, under the first free number."""
    folder = layout.plans(key, query_digest)
    number = len(store.list(folder))
    while True:
        try:
            store.create_json(f"{folder}/{number:08d}.json", {"trajectory": trajectory, "plan": plan.as_dict()})
            return
        except ObjectExistsError:
            number += 1


def sealed_plan(store: Store, layout: Layout, key: str, query_digest: str, trajectory: str) -> WalkPlan | None:
    """The newest sealed plan for this query and trajectory; a damaged or another query's one is warned about and passed over."""
    folder = layout.plans(key, query_digest)
    for name in reversed(store.list(folder)):
        try:
            content = store.read_json(f"{folder}/{name}")
            if content.get("trajectory") == trajectory:
                plan = WalkPlan.from_dict(content["plan"])
                plan.lane(key)
                return plan
        except (DamagedObjectError, MissingObjectError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s/%s/%s: the walk plan is not used: %s", store.url, folder, name, error)
    return None


def cohorts(plans: Mapping[str, WalkPlan]) -> Sequence[tuple[WalkPlan, tuple[str, ...]]]:
    """The queries grouped by the plan that they share, in the order in which the plans first appear."""
    grouped: dict[str, list[str]] = {}
    for key, plan in plans.items():
        grouped.setdefault(plan.digest, []).append(key)
    return [(plans[keys[0]], tuple(keys)) for keys in grouped.values()]
