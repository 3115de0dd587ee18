"""The run launcher: Dagster's default one, which also answers whether a run's worker still lives.

The default launcher has no health check, so run monitoring never notices that a run worker and its code server died
together, and the run stays STARTED and keeps its pool slot.
"""

from __future__ import annotations

from dagster import DagsterRun, DefaultRunLauncher
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus

from magic_pipeline.checkpoints.holder import is_gone
from magic_pipeline.orchestration.processes import process_of


class HealthCheckedRunLauncher(DefaultRunLauncher):
    """A run is called failed only when its process is provably gone, or, before its process has named itself, when
    its code server cannot be reached. In doubt it is called running: a live run declared dead would be run twice."""

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        process = process_of(run.run_id, run.tags)
        gone = None if process is None else is_gone(process)
        if gone:
            return CheckRunHealthResult(WorkerStatus.FAILED, f"{process}, which executed this run, is gone")
        client = self._get_grpc_client_for_termination(run.run_id)  # type: ignore[no-untyped-call]
        if process is None and client is not None:
            try:
                client.ping("")
            except DagsterUserCodeUnreachableError:
                return CheckRunHealthResult(WorkerStatus.FAILED, "the code server of this run cannot be reached")
        return CheckRunHealthResult(WorkerStatus.RUNNING)
