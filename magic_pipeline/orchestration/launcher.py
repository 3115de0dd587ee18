"""The run launcher: Dagster's default one, which also answers whether a run's worker still lives.

The default launcher has no health check, so run monitoring never notices that a run worker and its code server died
together, and the run stays STARTED and keeps its pool slot.
"""

from __future__ import annotations

import json

from dagster import DagsterRun, DefaultRunLauncher
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG

from magic_pipeline.checkpoints.holder import is_gone
from magic_pipeline.orchestration.processes import process_of


class HealthCheckedRunLauncher(DefaultRunLauncher):
    """A run is called failed only when its process is provably gone and a retry can be launched, or, before its process has
    named itself, when its code server cannot be reached. In doubt it is called running: a live run declared dead would be
    run twice."""

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        process = process_of(run.run_id, run.tags)
        gone = None if process is None else is_gone(process)
        if gone is False:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        answers = self._code_server_answers(run)
        if gone and (answers or not _comes_back(run)):
            return CheckRunHealthResult(WorkerStatus.FAILED, f"{process}, which executed this run, is gone")
        if process is None and not answers:
            return CheckRunHealthResult(WorkerStatus.FAILED, "the code server of this run cannot be reached")
        return CheckRunHealthResult(WorkerStatus.RUNNING)

    def _code_server_answers(self, run: DagsterRun) -> bool:
        """Also where the run does not say which one it is."""
        client = self._get_grpc_client_for_termination(run.run_id)  # type: ignore[no-untyped-call]
        if client is None:
            return True
        try:
            client.ping("")
        except DagsterUserCodeUnreachableError:
            return False
        return True


def _comes_back(run: DagsterRun) -> bool:
    """Whether the run's code server is one at a fixed port, which will answer there again.

    Until then the run must not be called failed: Dagster tries a failed run again once, at once, and without the code server
    that retry is lost without a trace. A server at a socket, as `dagster dev` has them, comes back at another.
    """
    return "port" in json.loads(run.tags.get(GRPC_INFO_TAG, "{}"))
