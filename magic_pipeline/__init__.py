"""magic_pipeline: exact training-data attribution (MAGIC) as a resumable Dagster pipeline."""

__version__ = "0.1.0"
