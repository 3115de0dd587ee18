"""Where a materialization comes from, in its metadata: experiment file as it was, data, library versions, git commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment

_GIT_SECONDS = 10


def provenance(opened: OpenExperiment) -> dict[str, Any]:
    """Of whatever this process makes from the opened experiment now."""
    from magic_pipeline.attribution.library_versions import versions
    from magic_pipeline.orchestration.asset_versions import experiment_metadata

    commit = git_commit(opened.experiment.folder)
    return {
        **experiment_metadata(opened.experiment),
        "fingerprint": opened.fingerprint,
        "data_digest": str(opened.dataset.digest),
        "versions": dg.MetadataValue.json(dict(versions())),
        **({} if commit is None else {"git_commit": commit}),
    }


def git_commit(folder: Path) -> str | None:
    """The commit that a folder's work tree stands at, with `-dirty` where tracked files were changed since; None outside of git."""

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(folder), *arguments]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ran.stdout.strip() if ran.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
