"""Runs without a UI: one Dagster run per asset, executed in this process, which the UI shows and can execute again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.execution.api import execute_run
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.storage.dagster_run import FINISHED_STATUSES, DagsterRunStatus, RunsFilter
from dagster._core.storage.tags import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    MAX_RETRIES_TAG,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.utils import make_new_run_id

from magic_pipeline.checkpoints.holder import is_gone
from magic_pipeline.orchestration.processes import process_of, process_tags

DEFINITIONS_MODULE = "magic_pipeline.definitions"
EXPERIMENTS_VARIABLE = "MAGIC_PIPELINE_EXPERIMENTS"
_ASSET_JOB = "__ASSET_JOB"
# The run's log is kept in full; what the terminal shows is the command line's own choice.
_QUIET_CONSOLE = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


def execute_asset(
    instance: dg.DagsterInstance,
    repository: dg.RepositoryDefinition,
    key: dg.AssetKey,
    partitions: tuple[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> dg.DagsterRun:
    """Execute one asset, or the range of its partitions from the first key to the last, and return the finished run.

    The run is made as the UI makes it, with the code location's origin, so that the UI can execute it again. It ignores
    pools: the store's lease guards the work. An interrupt ends the run as failed; no daemon retries it, since whoever
    interrupted a command wanted it to end.

    Args:
        repository: of the definitions as the UI loads them, `build_definitions(folder).get_repository_def()`.
        config: the asset's launch settings, as in the launchpad.
    """
    job = repository.get_job(_ASSET_JOB)
    run_id = make_new_run_id()
    tags = {**process_tags(run_id), MAX_RETRIES_TAG: "0"}
    if partitions is not None:
        tags |= {ASSET_PARTITION_RANGE_START_TAG: partitions[0], ASSET_PARTITION_RANGE_END_TAG: partitions[1]}
    code = ReconstructableRepository.for_module(DEFINITIONS_MODULE, "defs", working_directory=str(Path.cwd()))
    run = instance.create_run_for_job(
        job_def=job,
        run_id=run_id,
        run_config=_QUIET_CONSOLE
        | ({} if config is None else {"ops": {key.to_python_identifier(): {"config": config}}}),
        tags=tags,
        asset_selection={key},
        remote_job_origin=_repository_origin().get_job_origin(_ASSET_JOB),
        job_code_origin=code.get_python_origin().get_job_origin(_ASSET_JOB),
    )
    execute_run(InMemoryJob(job), run, instance)
    finished = instance.get_run_by_id(run_id)
    if finished is None:
        raise RuntimeError(f"run {run_id} was deleted while it was executed")
    return finished


def _repository_origin() -> RemoteRepositoryOrigin:
    """The origin of the code location as `dagster dev -m magic_pipeline.definitions` and workspace.yaml name it."""
    target = LoadableTargetOrigin(
        executable_path=sys.executable, module_name=DEFINITIONS_MODULE, working_directory=str(Path.cwd())
    )
    location = ManagedGrpcPythonEnvCodeLocationOrigin(target, location_name=DEFINITIONS_MODULE)
    return RemoteRepositoryOrigin(location, SINGLETON_REPOSITORY_NAME)


def mark_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """End, in Dagster's books, the runs whose process is provably gone. Returns their ids.

    A run that was killed together with everything that watched it stays STARTED for ever otherwise, and keeps its
    pool slot.
    """
    unfinished = [status for status in DagsterRunStatus if status not in FINISHED_STATUSES]
    marked = []
    for run in instance.get_runs(filters=RunsFilter(statuses=unfinished)):
        process = process_of(run.run_id, run.tags)
        if process is None or not is_gone(process):
            continue
        message = f"{process}, which executed this run, is gone. What it had sealed is kept; run it again to go on."
        if run.status == DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, message)
        else:
            instance.report_run_failed(run, message)
        marked.append(run.run_id)
    return marked


def failure_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> tuple[str, str]:
    """(kind, one line) of why a run failed; the kind is `input`, `interrupt` or `other`."""
    events: Sequence[dg.EventLogEntry] = instance.all_logs(run.run_id)
    for entry in events:
        event = entry.dagster_event
        if event is None or not event.is_step_failure:
            continue
        data = event.step_failure_data
        if data.user_failure_data is not None:
            kind = data.user_failure_data.metadata.get("kind")
            return str(kind.value if kind is not None else "other"), str(data.user_failure_data.description)
        if data.error is not None:
            interrupted = data.error.cls_name in ("DagsterExecutionInterruptedError", "KeyboardInterrupt")
            return "interrupt" if interrupted else "other", data.error.message.strip().splitlines()[-1]
    ends = [
        entry.dagster_event for entry in events if entry.dagster_event is not None and entry.dagster_event.is_failure
    ]
    message = (ends[-1].message or "") if ends else ""
    return ("interrupt" if "interrupted" in message else "other"), message or f"the run ended as {run.status.value}"
