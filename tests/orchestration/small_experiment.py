"""The experiment of these tests: linear regression in 6 steps of 3 segments with 3 queries; and what the event log says of it.

The chunk is fixed, for `auto` measures which is fastest, and another one rounds otherwise.

With `slow`, its task sleeps in every forward pass while there is a file of that name beside it, a tenth of a second or as
many as the file says, so that a test can kill it at a place of its choice.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import dagster as dg
from dagster._core.definitions.data_version import DATA_VERSION_TAG

SLOW_TASK = """
import contextlib
import time
from pathlib import Path
from magic_pipeline.tasks.linear_regression import LinearRegression

class Slow(LinearRegression):
    def example_losses(self, model, batch):
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float((Path(__file__).parent / "slow").read_text() or 0.1))
        return super().example_losses(model, batch)
"""
EXPERIMENT = """
name: {name}
task: {{type: "{task}", examples: 12, features: 2}}
training:
  {{epochs: 2, batch_size: 4, dtype: float64, optimizer: {{name: sgd, lr: 0.1}}, schedule: {{name: constant}}}}
queries: {{split: test, count: 3}}
attribution: {{segment_steps: 2, threads: 1, chunk: 3}}
"""


def write_experiment(folder: Path, name: str = "small", *, file: str | None = None, slow: bool = False) -> Path:
    """The experiment file, in a folder that is made if need be.

    Args:
        slow: with the task that sleeps, in a module of the folder's own, as one process may meet several.
    """
    folder.mkdir(exist_ok=True)
    module = f"slow_task_{zlib.crc32(str(folder.absolute()).encode()):08x}"
    if slow:
        (folder / f"{module}.py").write_text(SLOW_TASK)
    path = folder / (file or f"{name}.yaml")
    path.write_text(EXPERIMENT.format(name=name, task=f"{module}:Slow" if slow else "linear_regression"))
    return path


def materializations(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[tuple[str | None, str, bool]]:
    """(partition, data version, reported again) of every materialization of the asset, oldest first."""
    found = []
    for record in instance.fetch_materializations(key, limit=1000, ascending=True).records:
        event = record.asset_materialization
        assert event is not None
        assert event.tags is not None
        found.append((event.partition, event.tags[DATA_VERSION_TAG], bool(event.metadata["reported_again"].value)))
    return found


def red_partitions(instance: dg.DagsterInstance, key: dg.AssetKey) -> set[str]:
    """The partitions that the UI shows as failed or in progress: planned, and not materialized since."""
    storage = instance.event_log_storage
    return set(storage.get_latest_asset_partition_materialization_attempts_without_materializations(key))


def planned_partitions(instance: dg.DagsterInstance, key: dg.AssetKey, run_id: str) -> set[str]:
    """The partitions of the asset that a run was planned to make."""
    planned: set[str] = set()
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED):
        event = entry.dagster_event
        assert event is not None
        data = event.asset_materialization_planned_data
        if data.asset_key == key:
            # Event storages differ in whether they take one event a partition or one for all.
            subset = () if data.partitions_subset is None else data.partitions_subset.get_partition_keys()
            planned |= {*subset, *([] if data.partition is None else [data.partition])}
    return planned
