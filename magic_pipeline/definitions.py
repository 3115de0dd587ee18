"""What Dagster loads: `dagster dev -m magic_pipeline.definitions`, also through `[tool.dagster]` and workspace.yaml."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg

from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.headless import EXPERIMENTS_VARIABLE


@dg.definitions
def defs() -> dg.Definitions:
    """The experiments of the folder that MAGIC_PIPELINE_EXPERIMENTS names, `./experiments` by default."""
    return build_definitions(Path(os.environ.get(EXPERIMENTS_VARIABLE) or "experiments"))
