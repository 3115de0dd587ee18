"""What Dagster's runs of an experiment's assets took, from its books."""

from __future__ import annotations

from collections import defaultdict

import dagster as dg
from dagster._core.storage.dagster_run import DagsterRunStatus
from dagster._core.storage.tags import RETRY_NUMBER_TAG

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.reporting.html_report import RunCost


def run_costs(instance: dg.DagsterInstance, experiment: Experiment) -> list[RunCost]:
    """A row per asset that was ever run, in the order of its first run."""
    records = defaultdict(list)
    for record in reversed(instance.get_run_records()):
        for key in sorted(record.dagster_run.asset_selection or (), key=str):
            if key.path[0] == experiment.name:
                records[key.path[-1]].append(record)
    return [
        RunCost(
            asset,
            runs=len(found),
            unsuccessful=sum(
                one.dagster_run.status in (DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED) for one in found
            ),
            retries=sum(RETRY_NUMBER_TAG in one.dagster_run.tags for one in found),
            seconds=sum(one.end_time - one.start_time for one in found if one.start_time and one.end_time),
        )
        for asset, found in records.items()
    ]
