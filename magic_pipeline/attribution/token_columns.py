"""Scores of tokens: ragged lists, one per example, as columns of a score table. Local data only; no torch, no store.

The columns say themselves what they are: each field's metadata holds a description and, for lists, what one entry is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from magic_pipeline.errors import InputError, NonFiniteError

Integers = npt.NDArray[np.int64]
NO_TARGET = -100
_DESCRIPTIONS = {
    "token_score": "one number per token: d(query measurement) / d(weight of the loss of this token as the target); the token before "
    "it predicts it. Their sum is the column score. Exactly 0 where the token is no target (label -100), as the first one always is",
    "token_id": "the tokenizer's id of each token",
    "token_label": "the target at each token, -100 where there is none",
}


@dataclass(frozen=True)
class TokensOfUnit:
    """One example's tokens `[tokens]`: their ids, their labels (-100: no target) and their scores."""

    ids: Integers
    labels: Integers
    scores: npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TokenScores:
    """All examples' tokens in a row: those of row u are `[offsets[u], offsets[u + 1])`."""

    offsets: Integers
    ids: Integers
    labels: Integers
    scores: npt.NDArray[np.floating[Any]]

    def of(self, row: int) -> TokensOfUnit:
        """The tokens of one row."""
        part = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return TokensOfUnit(self.ids[part], self.labels[part], self.scores[part])

    def sums(self) -> npt.NDArray[np.floating[Any]]:
        """`[rows]`, each row's sum, made in float64, in the dtype of the scores."""
        starts, scores = self.offsets[:-1], self.scores.astype(np.float64)
        # reduceat gives an empty row its next neighbour's number.
        sums = np.where(np.diff(self.offsets) > 0, np.add.reduceat(np.append(scores, 0.0), starts), 0.0)
        return sums.astype(self.scores.dtype)

    def check(self, of_units: npt.NDArray[np.floating[Any]], query: str) -> None:
        """Raises InputError where the parts do not fit each other, and NonFiniteError."""
        if len(self.offsets) != len(of_units) + 1 or not len(self.ids) == len(self.labels) == len(self.scores):
            raise InputError("the lists of token scores, ids and labels do not fit the units", field=query)
        if self.scores.dtype != of_units.dtype or int(self.offsets[-1]) != len(self.scores):
            raise InputError("the token scores are of another dtype or number than the units' scores", field=query)
        if not np.isfinite(self.scores).all():
            raise NonFiniteError(f"{query}: a token's score is not finite")
        scale = float(np.abs(self.scores.astype(np.float64)).sum())
        if np.any(np.abs(self.sums() - of_units) > 8 * np.finfo(of_units.dtype).eps * scale):
            raise InputError("a unit's score is not the sum of its tokens' scores", field=query)
        if np.any(self.scores[self.labels == NO_TARGET] != 0):
            raise InputError("a token that is no target has a score other than 0", field=query)

    def __eq__(self, other: object) -> bool:
        """Bitwise equality."""
        return isinstance(other, TokenScores) and all(
            mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()
            for mine, theirs in zip(self._arrays(), other._arrays(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.offsets, self.ids, self.labels, self.scores


def token_types(score: pa.DataType) -> Mapping[str, pa.DataType]:
    """The columns of tokens, by the type of a score."""
    return {"token_score": pa.list_(score), "token_id": pa.list_(pa.int64()), "token_label": pa.list_(pa.int64())}


def token_fields(tokens: TokenScores) -> list[pa.Field]:
    """Fields that say what they hold."""
    types = token_types(pa.from_numpy_dtype(tokens.scores.dtype))
    return [
        pa.field(name, kind, nullable=False, metadata={"description": _DESCRIPTIONS[name], "entry": "token"})
        for name, kind in types.items()
    ]


def token_columns(tokens: TokenScores) -> list[pa.Array]:
    """The columns of `token_fields`."""
    offsets = pa.array(tokens.offsets.astype(np.int32))
    return [
        pa.ListArray.from_arrays(offsets, pa.array(values)) for values in (tokens.scores, tokens.ids, tokens.labels)
    ]


def read_tokens(content: pa.Table) -> TokenScores:
    """The inverse of `token_columns`. Raises ValueError where the lists of a row differ in length."""
    lengths, values = list[Integers](), list[npt.NDArray[Any]]()
    for name in ("token_score", "token_id", "token_label"):
        column = content[name].combine_chunks()
        lists = column if isinstance(column, pa.ListArray) else pa.concat_arrays(column.chunks)
        lengths.append(lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
        values.append(lists.flatten().to_numpy(zero_copy_only=False))
    if not all(np.array_equal(lengths[0], other) for other in lengths[1:]):
        raise ValueError("the lists of token scores, ids and labels differ in length")
    scores, ids, labels = values
    return TokenScores(np.concatenate([[0], np.cumsum(lengths[0])]), ids, labels, scores)
