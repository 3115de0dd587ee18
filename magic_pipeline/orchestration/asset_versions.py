"""Code versions and the static descriptions of an experiment's assets. No torch: Dagster loads these."""

from __future__ import annotations

from typing import Any

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment, recipe_content
from magic_pipeline.checkpoints.digests import fingerprint

# Raised when the numbers that the code computes change. The first is of training and walk, the second of what reports
# hold.
ENGINE_VERSION = "1"
REPORT_VERSION = "1"


def training_code_version(experiment: Experiment) -> str:
    """Changes with the engine and with every setting that may change the trained model, so that an edited file shows
    as stale."""
    return f"{ENGINE_VERSION}-{fingerprint(recipe_content(experiment, split_matters=True))[:12]}"


def experiment_metadata(experiment: Experiment) -> dict[str, Any]:
    """The experiment file's content, where it is and where its results are kept."""
    metadata: dict[str, Any] = {"storage": experiment.storage_url}
    if experiment.path is not None:
        text = experiment.path.read_text(encoding="utf-8")
        metadata["experiment_file"] = dg.MetadataValue.path(str(experiment.path.absolute()))
        metadata["experiment"] = dg.MetadataValue.md(f"```yaml\n{text}\n```")
    return metadata
