"""What is finished, read from the store alone. No torch, and no Dagster.

`trajectory_status` and its like look at one opened experiment; `stored_status` looks at everything that the store holds of an
experiment file, without building its task.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magic_pipeline.attribution.expectations import of_training, of_walk
from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.layout import Layout
from magic_pipeline.attribution.sealed_files import SealedFile, find_file
from magic_pipeline.checkpoints.chain import Chain
from magic_pipeline.checkpoints.digests import fingerprint
from magic_pipeline.checkpoints.lease import live_holder
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import DamagedObjectError, MissingObjectError

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment

logger = logging.getLogger("magic_pipeline.attribution")


@dataclass(frozen=True)
class TrajectoryStatus:
    """Training: `digest` is over the states' contents (None until complete); `sealed` of `segments` boundaries are reached."""

    complete: bool
    digest: str | None
    steps: int
    segments: int
    sealed: int
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True)
class QueryStatus:
    """One query's walk and scores.

    Attributes:
        segments, sealed: segments of its walk, and how many are sealed.
        step: the lowest sealed step; None where nothing is sealed, 0 when complete.
        walk_digest: of the finished walk's scores, trajectory and query; None until complete.
        scores_digest: of its score sheet; None while there is none of this very walk.
    """

    id: str
    key: str
    digest: str
    complete: bool
    segments: int
    sealed: int
    step: int | None
    walk_digest: str | None
    scores_digest: str | None


@dataclass(frozen=True)
class StoredExperiment:
    """One training fingerprint in the store."""

    fingerprint: str
    created_unix: float
    trajectory: TrajectoryStatus
    queries: tuple[QueryStatus, ...]
    matrix_digest: str | None
    holders: Mapping[str, dict[str, object]]


@dataclass(frozen=True)
class _Stored:
    """Where to look: a store, the folder of a training fingerprint, and its queries as (id, key, digest)."""

    store: Store
    layout: Layout
    queries: tuple[tuple[str, str, str], ...]
    steps: int

    @property
    def trajectory_chain(self) -> Chain:
        return Chain(self.store, self.layout.trajectory)


def trajectory_status(opened: OpenExperiment) -> TrajectoryStatus:
    """How far training is."""
    return _trajectory(_of(opened))


def query_statuses(opened: OpenExperiment, keys: Sequence[str] | None = None) -> tuple[QueryStatus, ...]:
    """How far the queries (all, or those of `keys`) are, in the experiment's order."""
    stored = _of(opened)
    return _queries(stored, _trajectory(stored), keys)


def matrix_digest(opened: OpenExperiment) -> str | None:
    """The digest of the score matrix; None while it is missing or is not of exactly the finished queries' present scores."""
    stored = _of(opened)
    return _matrix(stored, _queries(stored, _trajectory(stored), None))


def holder_of(opened: OpenExperiment, key: str | None) -> dict[str, object] | None:
    """Who holds the trajectory (None) or a query and is alive or cannot be told gone; None for nobody and for this process."""
    if key is None:
        return live_holder(opened.trajectory_chain)
    return live_holder(opened.query_chain(opened.query(key)))


def stored_status(experiment: Experiment) -> tuple[StoredExperiment, ...]:
    """Every training fingerprint that the store holds of this experiment, newest first."""
    store = Store(experiment.storage_url, options=experiment.storage_options or None)
    return stored_trainings(store, experiment.storage_folder)


def stored_trainings(store: Store, folder: str) -> tuple[StoredExperiment, ...]:
    """Every training fingerprint in an experiment's folder, newest first."""
    found = []
    for name in store.list(folder):
        layout = Layout(folder, name)
        try:
            description = store.read_json(layout.description)
        except (MissingObjectError, DamagedObjectError) as error:
            # Some servers go on listing a folder for a while after its last object was deleted.
            if next(iter(store.tree(layout.root)), None) is not None:
                logger.warning("%s/%s is passed over: %s", store.url, layout.root, error)
            continue
        found.append(_stored_experiment(store, layout, description))
    return tuple(sorted(found, key=lambda one: one.created_unix, reverse=True))


def current_training(experiment: Experiment) -> StoredExperiment | None:
    """The newest training in the store that was made from the settings that the file has now. Its data are not looked at."""
    from magic_pipeline.attribution.inventory import has_recipe

    store, folder = Store(experiment.storage_url, options=experiment.storage_options or None), experiment.storage_folder
    for training in stored_trainings(store, folder):
        if has_recipe(experiment, store.read_json(Layout(folder, training.fingerprint).description)):
            return training
    return None


def scores_digest(walk_digest: str) -> str:
    """The data version of a score sheet: it changes exactly with the walk that it was made from."""
    return fingerprint({"sheet_of": walk_digest})


def sheet_name(key: str, walk_digest: str) -> str:
    return f"{key}.{walk_digest[:16]}"


def find_sheet(store: Store, layout: Layout, key: str, walk_digest: str) -> SealedFile | None:
    """The whole score sheet of this very walk."""
    return find_file(store, layout.scores, sheet_name(key, walk_digest))


def expected_matrix_digest(queries: Sequence[QueryStatus]) -> str:
    """The digest of a matrix of these queries' present scores, in this order."""
    return fingerprint({"columns": [[query.key, query.walk_digest] for query in queries if query.complete]})


def _of(opened: OpenExperiment) -> _Stored:
    queries = tuple((query.id, query.key, query.digest) for query in opened.queries)
    return _Stored(opened.store, opened.layout, queries, opened.steps)


def _stored_experiment(store: Store, layout: Layout, description: Mapping[str, Any]) -> StoredExperiment:
    try:
        listed = store.read_json(layout.queries)["queries"]
    except (MissingObjectError, DamagedObjectError) as error:
        logger.warning("%s/%s: the queries cannot be listed: %s", store.url, layout.queries, error)
        listed = []
    stored = _Stored(store, layout, tuple((q["id"], q["key"], q["digest"]) for q in listed), int(description["steps"]))
    trajectory = _trajectory(stored)
    queries = _queries(stored, trajectory, None)
    holders = {"training_trajectory": live_holder(stored.trajectory_chain)} | {
        key: live_holder(Chain(store, layout.query(key, digest))) for _, key, digest in stored.queries
    }
    return StoredExperiment(
        layout.fingerprint,
        float(description["created_unix"]),
        trajectory,
        queries,
        _matrix(stored, queries),
        {name: holder for name, holder in holders.items() if holder is not None},
    )


def _trajectory(stored: _Stored) -> TrajectoryStatus:
    chain, expect = stored.trajectory_chain, of_training(stored.layout.fingerprint)
    complete = chain.completed(expect)
    if complete is not None:
        boundaries = tuple(complete.facts["boundaries"])
        segments = len(boundaries) - 1
        return TrajectoryStatus(True, complete.facts["trajectory"], stored.steps, segments, segments, boundaries)
    steps = {name.step for name in chain.sealed()}
    if not steps:
        return TrajectoryStatus(False, None, stored.steps, 0, 0)
    newest = chain.newest(expect, order="highest")
    boundaries = tuple(newest.facts["boundaries"]) if newest else ()
    reached = len([b for b in boundaries if newest is not None and 0 < b <= newest.step])
    return TrajectoryStatus(False, None, stored.steps, max(0, len(boundaries) - 1), reached, boundaries)


def _queries(stored: _Stored, trajectory: TrajectoryStatus, keys: Sequence[str] | None) -> tuple[QueryStatus, ...]:
    wanted = None if keys is None else set(keys)
    return tuple(_query(stored, trajectory, *query) for query in stored.queries if wanted is None or query[1] in wanted)


def _query(stored: _Stored, trajectory: TrajectoryStatus, id_: str, key: str, digest: str) -> QueryStatus:
    chain = Chain(stored.store, stored.layout.query(key, digest))
    expect = of_walk(stored.layout.fingerprint, digest, trajectory.digest or "")
    complete = chain.completed(expect) if trajectory.complete else None
    if complete is not None:
        walk: str = complete.facts["walk"]
        sheet = find_sheet(stored.store, stored.layout, key, walk)
        scores = None if sheet is None else scores_digest(walk)
        return QueryStatus(id_, key, digest, True, trajectory.segments, trajectory.segments, 0, walk, scores)
    step = min((name.step for name in chain.sealed()), default=None)
    sealed = 0 if step is None else sum(step <= boundary < stored.steps for boundary in trajectory.boundaries)
    return QueryStatus(id_, key, digest, False, trajectory.segments, sealed, step, None, None)


def _matrix(stored: _Stored, queries: Sequence[QueryStatus]) -> str | None:
    digest = expected_matrix_digest(queries)
    return None if find_file(stored.store, stored.layout.matrix, digest[:16]) is None else digest
