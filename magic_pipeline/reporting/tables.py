"""Top examples as Markdown, for Dagster's metadata, and as plain text, for the terminal."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from magic_pipeline.reporting.text import columns, markdown_text, one_line, score_text, short_count, short_size
from magic_pipeline.reporting.top_examples import Render, ScoredExample, TopExamples

if TYPE_CHECKING:
    from magic_pipeline.attribution.costs import Cost

THUMBNAIL = 48  # pixels
ID_WIDTH = 80
EXCERPT_WIDTH = 120


def markdown_table(top: TopExamples) -> str:
    """Two tables, the most helpful and the most harmful examples: rank, id, score, and what the example looks like.

    Text becomes an excerpt in which nothing is markup; a picture becomes a thumbnail inside the Markdown.
    """
    return "\n\n".join(
        [
            _markdown_section(_sentence(top.explanations[0]), top.helpful),
            _markdown_section(_sentence(top.explanations[1]), top.harmful),
        ]
    )


def _sentence(text: str) -> str:
    return markdown_text(text[0].upper() + text[1:], ID_WIDTH)


def costs_table(costs: Sequence[Cost]) -> str:
    """What each part has cost, as Markdown."""
    rows = ["| | steps | made twice | FLOPs | stored |", "|---|---:|---:|---:|---:|"]
    for cost in costs:
        what = markdown_text(cost.what, ID_WIDTH)
        rows.append(
            f"| {what} | {cost.steps:,} | {cost.redone:,} | {short_count(cost.flops)} | {short_size(cost.bytes)} |"
        )
    return "\n".join(rows)


def markdown_image(png: bytes, description: str) -> str:
    """A PNG inside Markdown, with no other file or address."""
    alt = markdown_text(description, ID_WIDTH)
    return f"![{alt}](data:image/png;base64,{base64.b64encode(png).decode()})"


def terminal_table(top: TopExamples, *, width: int = 100) -> str:
    """Helpful and harmful examples side by side, in at most `width` columns; `width` is at least 50."""
    column = max(12, (width - 26) // 2)
    rows = list(zip_longest(top.helpful, top.harmful))
    shown = [one_line(example.id, column) for row in rows for example in row if example is not None]
    low, high = top.headings
    column = max(columns(text) for text in [*shown, low, high])
    lines = [
        one_line(top.query_id, width),
        f"  {low:<{column}} {'score':>9}    {high:<{column}} {'score':>9}",
    ]
    lines += [f"  {_terminal_cell(left, column)}    {_terminal_cell(right, column)}".rstrip() for left, right in rows]
    return "\n".join(lines if rows else [*lines, "  none"])


def _terminal_cell(example: ScoredExample | None, column: int) -> str:
    if example is None:
        return " " * (column + 10)
    name = one_line(example.id, column)
    return f"{name}{' ' * (column - columns(name))} {score_text(example.score):>9}"


def _markdown_section(title: str, examples: Sequence[ScoredExample]) -> str:
    if not examples:
        return f"**{title}**\n\nnone"
    pictured = any(example.render is not None for example in examples)
    lines = [f"**{title}**", "", "| | example | score |" + (" |" if pictured else "")]
    lines += ["|--:|:--|--:|" + (":--|" if pictured else "")]
    for rank, example in enumerate(examples, start=1):
        cells = [str(rank), markdown_text(example.id, ID_WIDTH), score_text(example.score)]
        cells += [_markdown_render(example.render)] if pictured else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _markdown_render(render: Render) -> str:
    if render is None:
        return ""
    if isinstance(render, str):
        return markdown_text(render, EXCERPT_WIDTH)
    small = render.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    with io.BytesIO() as file:
        small.save(file, format="PNG", optimize=True)
        return markdown_image(file.getvalue(), "picture")
