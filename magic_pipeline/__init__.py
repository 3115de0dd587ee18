"""magic_pipeline: exact training-data attribution (MAGIC) as a resumable Dagster pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magic_pipeline.version import __version__

if TYPE_CHECKING:
    from magic_pipeline.attribution.loading_scores import load_scores
    from magic_pipeline.orchestration.component import MagicExperiment

__all__ = ["MagicExperiment", "__version__", "load_scores"]


def __getattr__(name: str) -> Any:
    """Imports on first use: `import magic_pipeline` alone costs nothing."""
    if name == "load_scores":
        from magic_pipeline.attribution.loading_scores import load_scores

        return load_scores
    if name == "MagicExperiment":
        from magic_pipeline.orchestration.component import MagicExperiment

        return MagicExperiment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """With what is imported on first use: `dg` looks here for components."""
    return sorted({*globals(), *__all__})
