"""The Dagster instance of a folder of experiments: persistent, local, configured for runs that may be killed at any
time.

`DAGSTER_HOME` names it where that is set; otherwise it is `.magic/dagster` beside the experiment files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import yaml
from filelock import FileLock

GPU_POOL = "gpu"
_LOCK = "magic_pipeline.lock"

_CONFIGURATION = {
    "telemetry": {"enabled": False},
    "nux": {"enabled": False},
    "run_launcher": {"module": "magic_pipeline.orchestration.launcher", "class": "HealthCheckedRunLauncher"},
    # One gang at a time takes the device; the slot belongs to the run, so it is held from the first step to the last.
    "concurrency": {"pools": {"granularity": "run", "default_limit": 1}, "runs": {"max_concurrent_runs": 4}},
    # A code server that is being restarted costs a waiting run nothing: it goes back into the queue, for ten minutes.
    "run_queue": {"max_user_code_failure_retries": 40, "user_code_failure_retry_delay": 15},
    "run_monitoring": {
        "enabled": True,
        "start_timeout_seconds": 600,
        "poll_interval_seconds": 15,
        "max_resume_run_attempts": 0,
        "free_slots_after_run_end_seconds": 30,
    },
    # A killed or preempted run is run again and resumes. What its ops raise is decided by `failures`, inside the run.
    "run_retries": {"enabled": True, "max_retries": 3, "retry_on_asset_or_op_failure": False},
}


def dagster_home(folder: Path) -> Path:
    """Where the instance of this folder of experiments lives; absolute, not created."""
    chosen = os.environ.get("DAGSTER_HOME")
    return Path(chosen).expanduser().absolute() if chosen else folder.absolute() / ".magic" / "dagster"


def prepare_home(home: Path) -> None:
    """Create the home and its dagster.yaml.

    A home that already holds another installation's data keeps the configuration it has, be it the default one.
    """
    configuration = home / "dagster.yaml"
    # What a process left that was killed in here does not make it somebody else's home.
    ours = (".tmp", _LOCK)
    if configuration.exists() or (home.exists() and any(not file.name.endswith(ours) for file in home.iterdir())):
        return
    home.mkdir(parents=True, exist_ok=True)
    # Written aside and linked, so that a second process never reads half of it; whoever is first wins.
    descriptor, name = tempfile.mkstemp(dir=home, suffix=".tmp")
    with os.fdopen(descriptor, "w") as file:
        file.write("# Written by magic-pipeline when it made this folder. Yours to edit.\n")
        yaml.safe_dump(_CONFIGURATION, file, sort_keys=False)
    try:
        os.link(name, configuration)
    except FileExistsError:
        pass
    finally:
        os.unlink(name)


@contextmanager
def open_instance(folder: Path) -> Iterator[dg.DagsterInstance]:
    """The folder's instance, made if there is none."""
    home = dagster_home(folder)
    home.mkdir(parents=True, exist_ok=True)
    # Two processes that make the databases of one home at once break each other's first migration.
    with FileLock(home / _LOCK):
        prepare_home(home)
        opened = dg.DagsterInstance.from_config(str(home))
    with opened as instance:
        yield instance


@contextmanager
def existing_instance(folder: Path) -> Iterator[dg.DagsterInstance | None]:
    """The folder's instance; None where there is none, and none is made."""
    home = dagster_home(folder)
    if not (home / "dagster.yaml").exists() and not (home / "storage").exists():
        yield None
        return
    with open_instance(folder) as instance:
        yield instance
