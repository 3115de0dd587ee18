"""The UI of a folder of experiments: Dagster's webserver and daemon on this machine alone, on the same instance as
`run`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from magic_pipeline.attribution.experiment import Experiment, load_experiments
from magic_pipeline.attribution.status import stored_status
from magic_pipeline.errors import InputError, StorageError
from magic_pipeline.orchestration.headless import DEFINITIONS_MODULE, EXPERIMENTS_VARIABLE, mark_dead_runs
from magic_pipeline.orchestration.instance import dagster_home, open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets, add_query_keys

logger = logging.getLogger("magic_pipeline.ui")

HOST = "127.0.0.1"


def prepare_ui(folder: Path) -> None:
    """Bring the instance's books up to date with the world: runs whose process is gone, queries that the stores
    know."""
    with open_instance(folder) as instance:
        for run_id in mark_dead_runs(instance):
            logger.info("run %s: its process is gone; marked as failed", run_id)
        for experiment in load_experiments(folder).values():
            if not isinstance(experiment, Experiment):
                logger.warning("%s", experiment)
                continue
            try:
                stored = stored_status(experiment)
            except (StorageError, OSError) as error:
                logger.warning("%s: its storage cannot be read now: %s", experiment.name, error)
                continue
            if stored:
                add_query_keys(instance, ExperimentAssets.of(experiment), [query.key for query in stored[0].queries])


def serve_ui(folder: Path, port: int) -> NoReturn:
    """Become Dagster's webserver, daemon and code server for this folder, until interrupted.

    Raises:
        InputError: the port is taken.
    """
    _check_port(port)
    prepare_ui(folder)
    environment = os.environ | {
        "DAGSTER_HOME": str(dagster_home(folder)),
        EXPERIMENTS_VARIABLE: str(folder.absolute()),
        "DAGSTER_DISABLE_TELEMETRY": "yes",
    }
    logger.info("http://%s:%d in a few seconds; Ctrl-C ends it", HOST, port)
    # A background job of a script starts with SIGINT ignored, and Dagster then ignores SIGTERM too: nothing could end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = ["-m", "dagster", "dev", "-m", DEFINITIONS_MODULE, "-h", HOST, "-p", str(port), "--log-level", "warning"]
    os.execve(sys.executable, [sys.executable, *command], environment)  # noqa: S606 - a fixed command, no shell


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        # As the webserver does: a port that was just left is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise InputError(f"cannot listen on {HOST}:{port} ({error}); choose another port", field="--port") from None
