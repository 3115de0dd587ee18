"""Score sheets and the score matrix in the store: made from finished walks only, sealed, and made again where damaged."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from magic_pipeline.attribution.expectations import of_walk
from magic_pipeline.attribution.opening import OpenExperiment, OpenQuery
from magic_pipeline.attribution.rank_parts import part_of
from magic_pipeline.attribution.score_matrix import ScoreMatrix, combine, write_score_matrix_file
from magic_pipeline.attribution.score_table import ScoreFacts, ScoreTable, read_score_table, write_score_table
from magic_pipeline.attribution.sealed_files import SealedFile, find_file, seal_file
from magic_pipeline.attribution.status import (
    expected_matrix_digest,
    find_sheet,
    query_statuses,
    scores_digest,
    sheet_name,
)
from magic_pipeline.attribution.token_columns import TokenScores
from magic_pipeline.attribution.trajectory import required_trajectory
from magic_pipeline.errors import MagicError


@dataclass(frozen=True)
class ScoreSheet:
    """One query's sealed Parquet file; `path` in the store, `digest` the data version."""

    key: str
    id: str
    path: str
    rows: int
    digest: str
    walk_digest: str


@dataclass(frozen=True)
class MatrixSheet:
    """The sealed matrix: `rows` units, `columns` queries."""

    path: str
    rows: int
    columns: int
    digest: str


def write_scores(opened: OpenExperiment, key: str) -> ScoreSheet:
    """The score sheet of a finished walk, written unless it is there already.

    Raises:
        InputError: there is no such query.
        MagicError: its walk is not finished.
        NonFiniteError: a score is NaN or infinite.
    """
    query, walk = opened.query(key), _finished_walk(opened, key)
    sealed = find_sheet(opened.store, opened.layout, key, walk)
    if sealed is None:
        table = _table_of_walk(opened, query)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "scores.parquet"
            write_score_table(table, file)
            facts = asdict(table.facts) | {"rows": len(table.ids)}
            sealed = seal_file(opened.store, opened.layout.scores, sheet_name(key, walk), file, facts)
    return ScoreSheet(key, query.id, sealed.path, int(sealed.facts["rows"]), scores_digest(walk), walk)


def read_scores(opened: OpenExperiment, key: str) -> ScoreTable:
    """A query's scores, from its sealed sheet.

    Raises:
        InputError: there is no such query.
        MagicError: it has no sheet of its finished walk.
    """
    query, walk = opened.query(key), _finished_walk(opened, key)
    sealed = find_sheet(opened.store, opened.layout, key, walk)
    if sealed is None:
        raise MagicError(
            f"query {query.id!r} has no score sheet yet; materialize attribution_scores (or call write_scores) first"
        )
    return _read(opened, sealed)


def write_score_matrix(opened: OpenExperiment) -> MatrixSheet:
    """All finished queries in one wide Parquet file, written unless it is there already.

    Raises:
        InputError: no query is finished.
    """
    finished = [query for query in query_statuses(opened) if query.complete]
    digest = expected_matrix_digest(finished)
    sealed = find_file(opened.store, opened.layout.matrix, digest[:16])
    if sealed is None:
        matrix = read_matrix(opened, [query.key for query in finished])
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "score_matrix.parquet"
            write_score_matrix_file(matrix, file, "parquet_wide")
            facts = {"digest": digest, "rows": len(matrix.ids), "queries": list(matrix.query_ids)}
            sealed = seal_file(opened.store, opened.layout.matrix, digest[:16], file, facts)
    return MatrixSheet(sealed.path, int(sealed.facts["rows"]), len(sealed.facts["queries"]), digest)


def read_matrix(opened: OpenExperiment, keys: Sequence[str] | None = None) -> ScoreMatrix:
    """The scores of the queries of `keys` (default: all that are finished), side by side; missing sheets are written first.

    Raises:
        InputError: no query is finished.
    """
    if keys is None:
        keys = [query.key for query in query_statuses(opened) if query.complete]
    for key in keys:
        write_scores(opened, key)
    return combine([read_scores(opened, key) for key in keys])


def _finished_walk(opened: OpenExperiment, key: str) -> str:
    query = opened.query(key)
    walk = query_statuses(opened, [key])[0].walk_digest
    if walk is None:
        raise MagicError(
            f"query {query.id!r}: its walk is not finished; materialize segment_checkpoints (or call walk) first"
        )
    return walk


def _table_of_walk(opened: OpenExperiment, query: OpenQuery) -> ScoreTable:
    trajectory = required_trajectory(opened)
    expect, parts = (
        of_walk(opened.fingerprint, query.digest, trajectory.digest),
        map(part_of, range(opened.ranks.count)),
    )
    complete = opened.query_chain(query).completed(expect, read=list(parts))
    if complete is None:
        raise MagicError(f"query {query.id!r}: its finished walk cannot be read any more")
    facts = ScoreFacts(
        experiment=opened.experiment.name,
        query_id=query.id,
        query_key=query.key,
        query_digest=query.digest,
        fingerprint=opened.fingerprint,
        trajectory_digest=trajectory.digest,
        walk_digest=complete.facts["walk"],
        unit=opened.experiment.attribution.unit,
        versions=complete.facts["plan"]["versions"],
    )
    scores = complete.tensors(part_of(0))["scores"]
    for rank in range(1, opened.ranks.count):
        scores = scores + complete.tensors(part_of(rank))["scores"]
    tokens = opened.scored.tokens
    if tokens is None:
        return ScoreTable(facts, opened.units, scores.numpy())
    of_tokens = TokenScores(tokens.offsets.numpy(), tokens.ids.numpy(), tokens.labels.numpy(), scores.numpy())
    return ScoreTable(facts, opened.units, of_tokens.sums(), of_tokens)


def _read(opened: OpenExperiment, sealed: SealedFile) -> ScoreTable:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores.parquet"
        opened.store.fetch_file(f"{sealed.folder}/blobs", sealed.blob, file)
        return read_score_table(file)
