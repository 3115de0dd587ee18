"""Dagster's records of an experiment, when something of it was removed from the storage: forgotten with it, or told of."""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from magic_pipeline.attribution.collecting import Collection
from magic_pipeline.orchestration.partitions import JOB_KINDS, ExperimentAssets


@dataclass(frozen=True)
class Records:
    """How much Dagster knows of an experiment: assets with events, partitions of queries, and finished runs of it alone."""

    assets: int
    partitions: int
    runs: int

    def line(self, done: bool) -> str:
        """For people."""
        told = f"Dagster's records: {self.assets} assets, {self.partitions} partitions and {self.runs} runs"
        return f"{told}: {'deleted' if done else 'with --yes they would be deleted too'}"


def records_of(instance: dg.DagsterInstance, experiment: str) -> Records:
    """What `forget` would remove."""
    partitions = instance.get_dynamic_partitions(ExperimentAssets(experiment, 1).queries_name)
    return Records(len(_assets(instance, experiment)), len(partitions), len(_runs(instance, experiment)))


def forget(instance: dg.DagsterInstance, experiment: str) -> Records:
    """Removes the experiment's runs, its queries' partitions and the events of its assets. Safe to be killed in and to repeat.

    Runs that made other experiments' assets too stay, and so do runs that are not finished.
    """
    found = records_of(instance, experiment)
    # Assets first: with a run its events go, and then nothing tells any more that the index still shows what it had made.
    keys = _assets(instance, experiment)
    if keys:
        instance.wipe_assets(keys)
    name = ExperimentAssets(experiment, 1).queries_name
    for key in instance.get_dynamic_partitions(name):
        instance.delete_dynamic_partition(name, key)
    for run_id in _runs(instance, experiment):
        instance.delete_run(run_id)
    return found


def tell_of_collection(instance: dg.DagsterInstance, experiment: str, found: Collection) -> bool:
    """An observation of the trajectory that says which of its states were freed; whether there were any."""
    states = [freed for freed in found.freed if freed.kind == "trajectory"]
    trajectory = ExperimentAssets(experiment, 1).trajectory
    if not found.done or not states or not instance.has_asset_key(trajectory):
        return False
    metadata: dict[str, dg.MetadataValue] = {
        "freed_by": dg.MetadataValue.text("magic-pipeline gc"),
        "freed_objects": dg.MetadataValue.int(sum(freed.objects for freed in states)),
        "freed_bytes": dg.MetadataValue.int(sum(freed.bytes for freed in states)),
        "trainings": dg.MetadataValue.text(", ".join(sorted({freed.training for freed in states}))),
    }
    why = "States were freed; materializing the trajectory, or walking a new query, makes them again, bit by bit."
    instance.report_runless_asset_event(dg.AssetObservation(trajectory, metadata=metadata, description=why))
    return True


def _assets(instance: dg.DagsterInstance, experiment: str) -> list[dg.AssetKey]:
    """Also of assets that the experiment file does not define any more, and of those whose runs a person has deleted."""
    return [key for key in instance.get_asset_keys(prefix=[experiment]) if key.path[0] == experiment]


def _runs(instance: dg.DagsterInstance, experiment: str) -> list[str]:
    found, names = [], {f"{experiment}_{kind}" for kind in JOB_KINDS}
    for run in instance.get_runs():
        chosen = {key.path[0] for key in run.asset_selection or ()}
        ours = chosen == {experiment} or (not chosen and run.job_name in names)
        if ours and run.status in FINISHED_STATUSES:
            found.append(run.run_id)
    return found
