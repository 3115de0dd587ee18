"""What `magic-pipeline run` does: one Dagster run per asset, for what is not finished and nothing else.

Finished means that the store holds it and that the event log says so with the same data version. What the store holds
and the event log lacks (killed between seal and report) is run too: its op finds the work done and only reports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.errors import InputError, MagicError
from magic_pipeline.orchestration.asset_versions import (
    report_code_version,
    training_code_version,
    validation_code_version,
    walk_code_version,
)
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.headless import execute_asset, failure_of, mark_dead_runs
from magic_pipeline.orchestration.materializations import recorded_version, recorded_versions
from magic_pipeline.orchestration.operating import opened_once
from magic_pipeline.orchestration.partitions import (
    QUERIES_PER_RUN,
    ExperimentAssets,
    contiguous_blocks,
)
from magic_pipeline.orchestration.runs_of_experiment import sync_query_keys
from magic_pipeline.orchestration.validation_assets import subset_keys

logger = logging.getLogger("magic_pipeline.run")

# Subsets of one run: a block of the widest batch, twice.
SUBSETS_PER_RUN = 256


class RunFailedError(MagicError):
    """A Dagster run did not succeed. `kind` is `input`, `interrupt` or `other`."""

    def __init__(self, message: str, *, kind: str, run_id: str) -> None:
        self.kind, self.run_id = kind, run_id
        # As for an InputError that is found before there is a run.
        self.exit_code = 2 if kind == "input" else 1
        super().__init__(message)


@dataclass
class Outcome:
    """What a `run` found and did.

    Attributes:
        runs: (asset, number of partitions, run id) of every Dagster run, in order.
        held: query key, or `training_trajectory`, -> the live process that works on it.
        marked: ids of earlier runs whose process turned out to be gone.
    """

    runs: list[tuple[str, int, str]] = field(default_factory=list)
    held: dict[str, Mapping[str, object]] = field(default_factory=dict)
    marked: list[str] = field(default_factory=list)


def run_experiment(
    instance: dg.DagsterInstance, experiment: Experiment, queries: Sequence[str] | None = None
) -> Outcome:
    """Bring the experiment's assets up to date, all queries or those of these ids.

    Raises:
        InputError: the experiment is wrong, or it has no such query.
        RunFailedError: a Dagster run failed.
    """
    return _Running(instance, experiment, queries).run()


class _Running:
    def __init__(self, instance: dg.DagsterInstance, experiment: Experiment, queries: Sequence[str] | None) -> None:
        self.instance, self.experiment, self.assets = instance, experiment, ExperimentAssets.of(experiment)
        self.outcome = Outcome(marked=mark_dead_runs(instance))
        self.repository = build_definitions(experiment.folder, read=experiment).get_repository_def()
        self.opened = opened_once(experiment)
        self.wanted = _chosen_keys({query.id: query.key for query in self.opened.queries}, queries)

    def run(self) -> Outcome:
        if not self._train():
            return self.outcome
        # Before the planning: a range of partitions exists only once its keys do.
        sync_query_keys(self.instance, self.assets, [query.key for query in self.opened.queries])
        self._walk()
        self._score()
        self._collect()
        self._validate()
        return self.outcome

    def _train(self) -> bool:
        """Whether there is a trajectory to walk back through."""
        from magic_pipeline.attribution.status import holder_of, trajectory_status

        status = trajectory_status(self.opened)
        code = training_code_version(self.experiment)
        if status.complete and recorded_version(self.instance, self.assets.trajectory, code) == status.digest:
            return True
        holder = None if status.complete else holder_of(self.opened, None)
        if holder is not None:
            self.outcome.held["training_trajectory"] = holder
            return False
        # States that gc has freed are left to the walk that needs them: of a finished training there is only something to report.
        self._execute(self.assets.trajectory, config={"make_freed_states": False})
        return True

    def _walk(self) -> None:
        from magic_pipeline.attribution.status import holder_of, query_statuses

        recorded = recorded_versions(self.instance, self.assets.segments, walk_code_version(self.experiment))
        unfinished = set()
        for status in query_statuses(self.opened, self.wanted):
            partitions = [self.assets.segment_key(status.key, rank) for rank in self.assets.rank_keys]
            if status.complete and all(recorded.get(partition) == status.walk_digest for partition in partitions):
                continue
            holder = None if status.complete else holder_of(self.opened, status.key)
            if holder is not None:
                self.outcome.held[status.key] = holder
            else:
                unfinished.add(status.key)
        first, last = self.assets.rank_keys[0], self.assets.rank_keys[-1]
        self._execute_blocks(
            self.assets.segments,
            unfinished,
            lambda start, end: (self.assets.segment_key(start, first), self.assets.segment_key(end, last)),
        )

    def _score(self) -> None:
        from magic_pipeline.attribution.status import query_statuses

        recorded = recorded_versions(self.instance, self.assets.scores, report_code_version(self.experiment))
        unfinished = {
            status.key
            for status in query_statuses(self.opened, self.wanted)
            if status.complete and (status.scores_digest is None or recorded.get(status.key) != status.scores_digest)
        }
        self._execute_blocks(self.assets.scores, unfinished, lambda start, end: (start, end))

    def _collect(self) -> None:
        from magic_pipeline.attribution.status import matrix_digest, query_statuses

        digest, code = matrix_digest(self.opened), report_code_version(self.experiment)
        if digest is not None and recorded_version(self.instance, self.assets.matrix, code) == digest:
            return
        if any(status.scores_digest is not None for status in query_statuses(self.opened)):
            self._execute(self.assets.matrix)

    def _validate(self) -> None:
        """What the file's validation section asks for, once there are scores to validate."""
        from magic_pipeline.attribution import validation
        from magic_pipeline.attribution.status import query_statuses

        section, opened = self.experiment.validation, self.opened
        if section.smoothness is not None:
            self._execute_unless_recorded(self.assets.smoothness, "smoothness", validation.smoothness_digest(opened))
        if section.derivative is not None and any(query.complete for query in query_statuses(opened)):
            self._execute_unless_recorded(self.assets.derivative, "derivative", validation.derivative_digest(opened))
        if section.lds is not None:
            self._retrain_subsets()
            digest = validation.lds_digest(opened)
            if digest is not None:
                self._execute_unless_recorded(self.assets.lds, "lds", digest)
        if section.removal is not None and any(query.complete for query in query_statuses(opened)):
            self._execute_unless_recorded(self.assets.removal, "removal", validation.removal_digest(opened))

    def _retrain_subsets(self) -> None:
        from magic_pipeline.attribution.validation import finished_subsets, held_subsets

        code = validation_code_version(self.experiment, "lds")
        recorded, finished = recorded_versions(self.instance, self.assets.subsets, code), finished_subsets(self.opened)
        held, order = held_subsets(self.opened), subset_keys(self.experiment)
        self.outcome.held |= held
        todo = {key for key in order if key not in finished or recorded.get(key) != finished[key].digest}
        for block in contiguous_blocks(order, todo - held.keys(), SUBSETS_PER_RUN):
            self._execute(self.assets.subsets, (block[0], block[-1]), len(block), "subsets")

    def _execute_unless_recorded(self, key: dg.AssetKey, section: str, digest: str | None) -> None:
        """Executes an asset of the validation, unless the event log has this very version of it."""
        code = validation_code_version(self.experiment, section)
        if digest is None or recorded_version(self.instance, key, code) != digest:
            self._execute(key)

    def _execute_blocks(
        self, key: dg.AssetKey, unfinished: Collection[str], bounds: Callable[[str, str], tuple[str, str]]
    ) -> None:
        order = self.instance.get_dynamic_partitions(self.assets.queries_name)
        for block in contiguous_blocks(order, unfinished, QUERIES_PER_RUN):
            self._execute(key, bounds(block[0], block[-1]), len(block))

    def _execute(
        self,
        key: dg.AssetKey,
        partitions: tuple[str, str] | None = None,
        count: int = 1,
        what: str = "queries",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        name = key.path[-1]
        logger.info("%s%s", name, f": {count} {what}" if partitions is not None else "")
        run = execute_asset(self.instance, self.repository, key, partitions, config)
        self.outcome.runs.append((name, count, run.run_id))
        if not run.is_success:
            kind, message = failure_of(self.instance, run)
            raise RunFailedError(message, kind=kind, run_id=run.run_id)


def _chosen_keys(keys: Mapping[str, str], ids: Sequence[str] | None) -> list[str]:
    if ids is None:
        return list(keys.values())
    unknown = [query for query in ids if query not in keys]
    if unknown:
        raise InputError(f"the experiment has no query {unknown[0]!r}; it has {len(keys)} queries", field="queries")
    return [keys[query] for query in ids]
