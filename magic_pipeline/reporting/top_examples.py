"""Which training examples helped and harmed a query most, with what a person sees of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from magic_pipeline.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

Render: TypeAlias = "str | Image | None"
"""What a person sees of an example: text, a picture, or nothing but its id."""


@dataclass(frozen=True)
class ScoredExample:
    """One training example and its score for the query."""

    id: str
    score: float
    render: Render = None


@dataclass(frozen=True)
class TopExamples:
    """A query and its most influential examples.

    Attributes:
        query: what the query looks like.
        helpful: negative scores, the lowest first: more weight on these lowers the query's measurement.
        harmful: positive scores, the highest first.
        measurement: what the query measures by name; None is its loss, of which less is better.
    """

    query_id: str
    query: Render
    helpful: tuple[ScoredExample, ...]
    harmful: tuple[ScoredExample, ...]
    measurement: str | None = None

    @property
    def headings(self) -> tuple[str, str]:
        """What stands over negative and over positive scores: whether they help is known of a loss alone."""
        if self.measurement is None:
            return "most helpful", "most harmful"
        return f"lower {self.measurement} most", f"raise {self.measurement} most"

    @property
    def explanations(self) -> tuple[str, str]:
        """The headings, and what they mean."""
        low, high = self.headings
        if self.measurement is None:
            return f"{low}: more weight on these lowers the query's loss", f"{high}: more weight on these raises it"
        return f"{low}, with more weight", f"{high}, with more weight"


def top_examples(
    query_id: str,
    query: Render,
    ids: Sequence[str],
    scores: npt.ArrayLike,
    *,
    count: int = 8,
    render: Callable[[int], Render] = lambda index: None,
    measurement: str | None = None,
) -> TopExamples:
    """The `count` most helpful and most harmful examples of a query; of equal scores the first in order.

    Args:
        scores: [examples], in the order of `ids`.
        render: what the example at an index looks like; called for the chosen ones only.

    Raises:
        InputError: `scores` is not one finite number per id.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (len(ids),):
        raise InputError(f"expected {len(ids)} scores, one per id, found {values.shape}", field=f"query {query_id!r}")
    if not np.isfinite(values).all():
        bad = ids[int(np.flatnonzero(~np.isfinite(values))[0])]
        raise InputError(f"the score of {bad!r} is not finite", field=f"query {query_id!r}")

    def chosen(order: npt.NDArray[np.intp]) -> tuple[ScoredExample, ...]:
        return tuple(ScoredExample(ids[i], float(values[i]), render(int(i))) for i in order[:count] if values[i] != 0)

    rising, falling = np.argsort(values, kind="stable"), np.argsort(-values, kind="stable")
    return TopExamples(
        query_id,
        query,
        helpful=chosen(rising[values[rising] < 0]),
        harmful=chosen(falling[values[falling] > 0]),
        measurement=measurement,
    )
