"""What every op does around the mission: names its process on the run, forwards logs, classifies failures, opens the
experiment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.errors import HeldError
from magic_pipeline.orchestration.failures import classified_failures
from magic_pipeline.orchestration.forwarded_logs import forwarded_logs
from magic_pipeline.orchestration.processes import die_with_the_run, process_tags

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment

logger = logging.getLogger("magic_pipeline.orchestration")

HELD_POLL_SECONDS = 5.0
_HELD_LOG_SECONDS = 60.0
_last_opened: list[OpenExperiment] = []


@contextmanager
def operating(context: dg.AssetExecutionContext) -> Iterator[None]:
    """Around the whole body of an op."""
    die_with_the_run()
    context.instance.add_run_tags(context.run.run_id, process_tags(context.run.run_id))
    with forwarded_logs(context.log), classified_failures(context):
        yield


def opened_once(experiment: Experiment) -> OpenExperiment:
    """The experiment, opened. A process that executes several runs of one experiment opens it once."""
    from magic_pipeline.attribution.opening import open_experiment

    if not _last_opened or _identity(_last_opened[0].experiment) != _identity(experiment):
        _last_opened[:] = [open_experiment(experiment)]
    return _last_opened[0]


def _identity(experiment: Experiment) -> tuple[object, ...]:
    """What makes two loaded experiments the same; how the path of their file was written does not."""
    return experiment.folder, experiment.model_dump(), experiment.storage_options


def stall_limit(experiment: Experiment) -> float | None:
    """Seconds without a step after which this process is to be ended; None where it only watches a gang, whose processes are."""
    from magic_pipeline.attribution.gang import processes_of

    return None if processes_of(experiment) > 1 else 60 * experiment.attribution.stall_timeout_minutes


def wait_while_held(error: HeldError, *, since: float, should_stop: Callable[[], bool]) -> None:
    """One wait for a live holder, named in the log about once a minute.

    Args:
        since: when the waiting began, `time.monotonic()`.
    """
    waited = time.monotonic() - since
    if waited % _HELD_LOG_SECONDS < HELD_POLL_SECONDS:
        logger.info("%s Waiting (%d s so far).", error, waited)
    until = time.monotonic() + HELD_POLL_SECONDS
    while time.monotonic() < until and not should_stop():
        time.sleep(0.2)
