"""Which process executes a run, written on the run as a tag, so that any later process can tell whether it is gone."""

from __future__ import annotations

import json
from collections.abc import Mapping

from magic_pipeline.checkpoints.holder import Holder

PROCESS_TAG = "magic_pipeline/process"


def process_tags(run_id: str) -> dict[str, str]:
    """The tag that names this process as the one that executes the run: host, boot id, pid, start time."""
    return {PROCESS_TAG: json.dumps(Holder.this_process(run_id).as_json())}


def process_of(run_id: str, tags: Mapping[str, str]) -> Holder | None:
    """The process that executes the run, or None where the tags do not say.

    A re-executed run inherits its parent's tags: a tag that names another run says nothing.
    """
    try:
        holder = Holder.from_json(json.loads(tags[PROCESS_TAG]))
    except (KeyError, TypeError, ValueError):
        return None
    return holder if holder.run_id == run_id else None
