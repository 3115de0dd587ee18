"""Scores for a notebook: from an exported file, an experiment file, or the folder in the storage. No torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.layout import Layout
from magic_pipeline.attribution.score_matrix import ScoreMatrix, combine
from magic_pipeline.attribution.score_matrix_files import read_exported_scores
from magic_pipeline.attribution.score_table import read_score_table
from magic_pipeline.attribution.status import StoredExperiment, find_sheet, stored_trainings
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import InputError

_EXPORTED = (".parquet", ".arrow", ".csv", ".npz")


def load_scores(source: str | os.PathLike[str], *, fingerprint: str = "") -> ScoreMatrix:
    """The scores of all finished queries: `scores[i, q]`, `ids`, `query_ids`, `provenance`, `to_pandas()`, `to_xarray()`.

    Args:
        source: a file that `magic-pipeline export` wrote; an experiment file (.yaml); or the folder of an experiment in its
            storage, as `.magic/store/digits` or `s3://bucket/prefix/digits` (endpoint and credentials from the environment).
        fingerprint: the training, by the first digits of its fingerprint, where the storage holds several; by default the newest.

    Raises:
        InputError: there is nothing there, or no query is finished.
        DamagedObjectError: what is there is not what was written.
    """
    text = os.fspath(source)
    if text.endswith(_EXPORTED):
        return read_exported_scores(Path(text))
    if text.endswith((".yaml", ".yml")):
        experiment = load_experiment(Path(text))
        store, folder = (
            Store(experiment.storage_url, options=experiment.storage_options or None),
            experiment.storage_folder,
        )
    else:
        above, _, folder = text.rstrip("/").rpartition("/")
        store = Store(above or ".")
    trainings = [one for one in stored_trainings(store, folder) if one.fingerprint.startswith(fingerprint)]
    if not trainings:
        what = f"no training {fingerprint!r}" if fingerprint else "no training"
        raise InputError(f"there is {what} in {store.url}/{folder}", field="source")
    return _stored_scores(store, folder, trainings[0])


def _stored_scores(store: Store, folder: str, training: StoredExperiment) -> ScoreMatrix:
    layout, tables = Layout(folder, training.fingerprint), []
    for query in training.queries:
        sealed = None if query.walk_digest is None else find_sheet(store, layout, query.key, query.walk_digest)
        if sealed is None:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "scores.parquet"
            store.fetch_file(f"{sealed.folder}/blobs", sealed.blob, file)
            tables.append(read_score_table(file))
    if not tables:
        raise InputError(f"no query of {store.url}/{folder} has scores yet", field="source")
    return combine(tables)
