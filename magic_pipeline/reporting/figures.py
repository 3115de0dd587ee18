"""Top examples as PNG figures: one query in detail, or a gallery with a row per query.

Drawn with matplotlib's objects on an Agg canvas: no window, no global state, so any thread may draw. Equal input gives equal
bytes. Fonts are the ones that matplotlib brings along.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from magic_pipeline.errors import InputError
from magic_pipeline.reporting.text import excerpt, one_line, score_text
from magic_pipeline.reporting.top_examples import Render, ScoredExample, TopExamples
from magic_pipeline.tasks.extras import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and vermilion of the Okabe-Ito palette: told apart by colour-blind readers too.
HELPFUL, HARMFUL = "#0072B2", "#D55E00"
INK, MUTED, FRAME, PAPER = "#1a1a1a", "#6b6b6b", "#c8c8c8", "#f7f7f5"
DOTS_PER_INCH = 120  # a query with five examples a side fits the dialog of the UI
CHARACTER = 0.0605  # inches wide, of the 7 point monospaced face
LINE = 0.128  # inches high, likewise


@dataclass(frozen=True)
class _Box:
    """A place on the sheet in inches; x, y is its upper left corner, counted from the sheet's."""

    x: float
    y: float
    width: float
    height: float


class _Sheet:
    """A figure measured in inches from its upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        figures = import_extra("matplotlib.figure", extra="reports", needed_by="a figure")
        import_extra("PIL", extra="reports", needed_by="a figure")
        self.width, self.height = width, height
        self.figure: Figure = figures.Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")

    def axes(self, box: _Box) -> Axes:
        """Axes without ticks that fill the box."""
        bottom = self.height - box.y - box.height
        place = (box.x / self.width, bottom / self.height, box.width / self.width, box.height / self.height)
        axes = self.figure.add_axes(place)
        axes.set_xticks([])
        axes.set_yticks([])
        return axes

    def text(self, x: float, y: float, text: str, *, size: float, colour: str = INK, **style: str) -> None:
        """A line of text whose top is at y; style is matplotlib's."""
        place = (x / self.width, 1 - y / self.height)
        known: dict[str, Any] = {"va": "top", "family": "DejaVu Sans", **style}
        self.figure.text(*place, _drawable(text), fontsize=size, color=colour, parse_math=False, **known)

    def render(self, box: _Box, render: Render, *, frame: str = FRAME, thick: float = 0.8) -> None:
        """What an example looks like: its picture, the beginning of its text, or an empty frame."""
        axes = self.axes(box)
        for spine in axes.spines.values():
            spine.set_color(frame)
            spine.set_linewidth(thick)
        if isinstance(render, str):
            axes.set_facecolor(PAPER)
            columns, lines = int((box.width - 0.14) / CHARACTER), int((box.height - 0.1) / LINE)
            shown = _drawable(excerpt(render, width=columns, lines=lines))
            style: dict[str, Any] = {"family": "DejaVu Sans Mono", "va": "top", "transform": axes.transAxes}
            place = (0.07 / box.width, 1 - 0.06 / box.height)
            axes.text(*place, shown, fontsize=7, color=INK, parse_math=False, linespacing=1.12, **style)
        elif render is not None:
            axes.imshow(np.asarray(render.convert("RGB")), interpolation="nearest", aspect="equal", resample=False)

    def png(self) -> bytes:
        """The sheet as a PNG file's bytes."""
        with io.BytesIO() as file:
            self.figure.savefig(file, format="png", metadata={"Software": None})
            return file.getvalue()


def query_figure(top: TopExamples) -> bytes:
    """One query, its most helpful and its most harmful examples with ids and scores, as PNG.

    Raises:
        InputError: the extra `reports` is not installed.
    """
    return (_pictures if _is_pictured([top]) else _texts)(top)


def gallery_figure(tops: Sequence[TopExamples], *, title: str = "", count: int = 5) -> bytes:
    """A row per query: the query, its `count` most helpful and its `count` most harmful examples (one each if they are text).

    Raises:
        InputError: there is no query, or the extra `reports` is not installed.
    """
    if not tops:
        raise InputError("expected at least one query to show, found none")
    return (_picture_gallery if _is_pictured(tops) else _text_gallery)(tops, title, count)


def _is_pictured(tops: Sequence[TopExamples]) -> bool:
    renders = [render for top in tops for render in (top.query, *(e.render for e in (*top.helpful, *top.harmful)))]
    return any(render is not None for render in renders) and not any(isinstance(render, str) for render in renders)


def _sides(top: TopExamples) -> list[tuple[str, str, tuple[ScoredExample, ...]]]:
    return [
        (top.explanations[0], HELPFUL, top.helpful),
        (top.explanations[1], HARMFUL, top.harmful),
    ]


def _pictures(top: TopExamples) -> bytes:
    margin, side, gap, big = 0.3, 0.95, 0.16, 1.9
    count = max(len(top.helpful), len(top.harmful), 4)
    left, row = margin + big + 0.45, 0.3 + side + 0.5
    sheet = _Sheet(left + count * (side + gap) - gap + margin, 2 * row + 2 * margin - 0.1)
    sheet.text(margin, margin, "query", size=9, weight="bold")
    sheet.render(_Box(margin, margin + 0.3, big, big), top.query, frame=INK, thick=1.2)
    sheet.text(margin, margin + 0.38 + big, one_line(top.query_id, 30), size=7, colour=MUTED)
    for number, (heading, colour, examples) in enumerate(_sides(top)):
        y = margin + number * row
        sheet.text(left, y, heading, size=9, colour=colour, weight="bold")
        for place, example in enumerate(examples):
            x = left + place * (side + gap)
            sheet.render(_Box(x, y + 0.3, side, side), example.render)
            sheet.text(x, y + 0.35 + side, score_text(example.score), size=8, colour=colour, weight="bold")
            sheet.text(x, y + 0.52 + side, one_line(example.id, 21), size=5.5, colour=MUTED)
        if not examples:
            sheet.text(left, y + 0.3, "none", size=8, colour=MUTED)
    return sheet.png()


def _texts(top: TopExamples) -> bytes:
    margin, width, height, gap = 0.3, 4.6, 0.75, 0.34
    rows = max(len(top.helpful), len(top.harmful), 1)
    above = margin + 0.28 + 1.4 + 0.3
    sheet = _Sheet(2 * width + 3 * margin, above + 0.3 + rows * (height + gap) + 0.1)
    sheet.text(margin, margin, f"query   {one_line(top.query_id, 100)}", size=9, weight="bold")
    sheet.render(_Box(margin, margin + 0.28, 2 * width + margin, 1.4), top.query, frame=INK, thick=1.2)
    for number, (heading, colour, examples) in enumerate(_sides(top)):
        x = margin + number * (width + margin)
        sheet.text(x, above, heading, size=9, colour=colour, weight="bold")
        for place, example in enumerate(examples):
            y = above + 0.3 + place * (height + gap)
            _text_card(sheet, _Box(x, y, width, height), example, colour)
        if not examples:
            sheet.text(x, above + 0.3, "none", size=8, colour=MUTED)
    return sheet.png()


def _text_card(sheet: _Sheet, box: _Box, example: ScoredExample, colour: str) -> None:
    """An example's score and id above the beginning of its text."""
    sheet.text(box.x, box.y, score_text(example.score), size=7.5, colour=colour, weight="bold")
    sheet.text(box.x + 0.75, box.y, one_line(example.id, int((box.width - 0.8) / 0.066)), size=7, colour=MUTED)
    sheet.render(_Box(box.x, box.y + 0.17, box.width, box.height), example.render)


def _picture_gallery(tops: Sequence[TopExamples], title: str, count: int) -> bytes:
    margin, side, gap, between = 0.3, 0.62, 0.09, 0.4
    row, block = side + 0.3, count * (side + gap) - gap
    starts = (margin + side + between, margin + side + 2 * between + block)
    above = margin + (0.42 if title else 0.0)
    sheet = _Sheet(starts[1] + block + margin, above + 0.3 + len(tops) * row + 0.12)
    if title:
        sheet.text(margin, margin, title, size=11, weight="bold")
    sheet.text(margin, above, "query", size=8.5, weight="bold")
    for start, (heading, colour, _) in zip(starts, _sides(tops[0]), strict=True):
        sheet.text(start, above, heading.partition(":")[0], size=8.5, colour=colour, weight="bold")
    for number, top in enumerate(tops):
        y = above + 0.28 + number * row
        sheet.render(_Box(margin, y, side, side), top.query, frame=INK, thick=1.2)
        for start, (_, colour, examples) in zip(starts, _sides(top), strict=True):
            for place, example in enumerate(examples[:count]):
                x = start + place * (side + gap)
                sheet.render(_Box(x, y, side, side), example.render)
                middle = x + side / 2
                sheet.text(middle, y + side + 0.04, score_text(example.score), size=6.5, colour=colour, ha="center")
    return sheet.png()


def _text_gallery(tops: Sequence[TopExamples], title: str, count: int) -> bytes:
    margin, width, height, gap = 0.3, 3.3, 0.9, 0.36
    above = margin + (0.42 if title else 0.0)
    sheet = _Sheet(3 * width + 4 * margin, above + 0.3 + len(tops) * (height + gap) + 0.1)
    starts = [margin + place * (width + margin) for place in range(3)]
    if title:
        sheet.text(margin, margin, title, size=11, weight="bold")
    sheet.text(starts[0], above, "query", size=8.5, weight="bold")
    for start, (heading, colour, _) in zip(starts[1:], _sides(tops[0]), strict=True):
        sheet.text(start, above, heading.partition(":")[0], size=8.5, colour=colour, weight="bold")
    for number, top in enumerate(tops):
        y = above + 0.3 + number * (height + gap)
        sheet.text(starts[0], y, one_line(top.query_id, 48), size=7, colour=MUTED)
        sheet.render(_Box(starts[0], y + 0.17, width, height), top.query, frame=INK, thick=1.2)
        for start, (_, colour, examples) in zip(starts[1:], _sides(top), strict=True):
            for example in examples[:1]:
                _text_card(sheet, _Box(start, y, width, height), example, colour)
    return sheet.png()


def _drawable(text: str) -> str:
    """The text with a box in place of every character that the fonts have no glyph for."""
    known = _glyphs()
    return "".join(char if char == "\n" or ord(char) in known else "\u25a1" for char in text)


@cache
def _glyphs() -> frozenset[int]:
    """The characters that both of the faces used here have."""
    from matplotlib.font_manager import findfont, get_font

    faces = [get_font(findfont(name, fallback_to_default=False)) for name in ("DejaVu Sans", "DejaVu Sans Mono")]
    return frozenset.intersection(*(frozenset(face.get_charmap()) for face in faces))
