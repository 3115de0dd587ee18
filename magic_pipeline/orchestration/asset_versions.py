"""Code versions: what shows in Dagster as stale as soon as an experiment file is edited. No torch: Dagster loads these.

A code version holds the project's own numbers below and every setting that may change the asset's content, and nothing else: how
the work is done (batch of queries, memory, device, threads, storage) leaves everything fresh. Data, weights and query texts are no
settings: they have data versions of their own (inputs_assets.py).
"""

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
    """Of the trained model: the whole recipe. The split into micro-batches counts, for nobody knows here whether the model draws
    dropout or batch statistics."""
    return f"{ENGINE_VERSION}-{_short(recipe_content(experiment, split_matters=True))}"


def walk_code_version(experiment: Experiment) -> str:
    """Of a query's walk: the recipe, the unit of the scores and what queries measure."""
    return f"{ENGINE_VERSION}-{_short(_walked(experiment))}"


def report_code_version(experiment: Experiment) -> str:
    """Of scores and their matrix."""
    return f"{REPORT_VERSION}-{walk_code_version(experiment)}"


def validation_code_version(experiment: Experiment, section: str) -> str:
    """Of a part of the validation, by its name in the file; what only sets a bound for a warning does not count."""
    settings = getattr(experiment.validation, section).model_dump(mode="json", exclude={"bound", "keep_models"})
    return f"{report_code_version(experiment)}-{_short(settings)}"


def experiment_metadata(experiment: Experiment) -> dict[str, Any]:
    """The experiment file's content as it was read, where it is and where its results are kept."""
    metadata: dict[str, Any] = {"storage": experiment.storage_url}
    if experiment.path is not None:
        metadata["experiment_file"] = dg.MetadataValue.path(str(experiment.path.absolute()))
        metadata["experiment"] = dg.MetadataValue.md(f"```yaml\n{experiment.text}\n```")
    return metadata


def _walked(experiment: Experiment) -> dict[str, Any]:
    content = {"recipe": recipe_content(experiment, split_matters=True)}
    return content | {"unit": experiment.attribution.unit, "measurement": experiment.queries.measurement}


def _short(content: dict[str, Any]) -> str:
    return fingerprint(content)[:12]
