"""Which process executes a run, written on the run as a tag, so that any later process can tell whether it is gone."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping

from magic_pipeline.checkpoints.holder import Holder, die_with

# Dagster's UI shows no tag whose name begins so: this one is for machines.
PROCESS_TAG = ".dagster/magic_pipeline/process"


def process_tags(run_id: str) -> dict[str, str]:
    """The tag that names this process as the one that executes the run: host, boot id, pid, start time.

    Where Dagster's multiprocess executor gave the step a process of its own, it is the run's that is named.
    """
    executing = os.getppid() if _is_a_step_process() else os.getpid()
    return {PROCESS_TAG: json.dumps(Holder.process(executing, run_id).as_json())}


def die_with_the_run() -> None:
    """In a step's own process: end when the run's process is killed, which otherwise leaves it computing for nobody."""
    if _is_a_step_process():
        die_with(os.getppid())


def _is_a_step_process() -> bool:
    # Dagster tells a step in no other way what kind of process it is in.
    target = getattr(multiprocessing.current_process(), "_target", None)
    return getattr(target, "__name__", None) == "_execute_command_in_child_process"


def process_of(run_id: str, tags: Mapping[str, str]) -> Holder | None:
    """The process that executes the run, or None where the tags do not say.

    A re-executed run inherits its parent's tags: a tag that names another run says nothing.
    """
    try:
        holder = Holder.from_json(json.loads(tags[PROCESS_TAG]))
    except (KeyError, TypeError, ValueError):
        return None
    return holder if holder.run_id == run_id else None
