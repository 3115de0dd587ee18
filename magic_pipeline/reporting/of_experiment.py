"""Top examples of an opened experiment's queries: scores from the store, pictures and texts from the task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from magic_pipeline.attribution.scores import read_scores
from magic_pipeline.reporting.top_examples import Render, TopExamples, top_examples
from magic_pipeline.tasks import protocol

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment


def query_top_examples(opened: OpenExperiment, key: str, *, count: int = 8, rendered: bool = True) -> TopExamples:
    """The most helpful and most harmful examples of a query that has a score sheet.

    Args:
        rendered: whether the task is asked what the examples look like; ids alone are enough for a terminal.

    Raises:
        InputError: there is no such query. MagicError: it has no scores yet.
    """
    query, table = opened.query(key), read_scores(opened, key)
    first = {opened.dataset.ids[index]: index for index in reversed(range(len(opened.dataset)))}

    def render(row: int) -> Render:
        if not rendered:
            return None
        if table.facts.unit == "document":
            return protocol.render_document(opened.task, table.ids[row])
        # Examples that share an id share a score; the first of them is shown.
        return protocol.render(opened.task, opened.dataset[first[table.ids[row]]])

    shown = protocol.render(opened.task, query.query.examples[0]) if rendered else None
    measurement = query.query.measurement
    return top_examples(query.id, shown, table.ids, table.scores, count=count, render=render, measurement=measurement)


def last_steps(opened: OpenExperiment) -> list[int]:
    """`[units]`: the last training step that used each."""
    last = [0] * len(opened.units)
    for step, batch in enumerate(opened.order):
        for index in batch:
            for unit in opened.units_of_example(index):
                last[unit] = step
    return last


def experiment_gallery(opened: OpenExperiment, keys: Sequence[str], *, count: int = 5) -> bytes:
    """A row per query: the query, its most helpful and its most harmful examples, as PNG."""
    from magic_pipeline.reporting.figures import gallery_figure

    tops = [query_top_examples(opened, key, count=count) for key in keys]
    return gallery_figure(tops, title=f"{opened.experiment.name}: which training examples helped and hurt", count=count)
