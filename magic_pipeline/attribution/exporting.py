"""Scores as files for other tools: Parquet, CSV or NPZ, with the ids exactly as the user gave them and with their provenance."""

from __future__ import annotations

from pathlib import Path

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.score_matrix import MatrixFormat, write_score_matrix_file
from magic_pipeline.attribution.scores import read_matrix


def export_scores(opened: OpenExperiment, *, format: MatrixFormat, output: Path) -> int:  # noqa: A002
    """Writes the scores of all finished queries to `output`, whole or not at all; returns its rows.

    Raises:
        InputError: no query is finished, the format is unknown, or `output` is no file in a folder that exists.
        StorageError: the file cannot be written.
    """
    return write_score_matrix_file(read_matrix(opened), output, format)
