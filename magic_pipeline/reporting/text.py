"""Other people's text made safe to show: ids and documents hold any Unicode, control characters and markup included."""

from __future__ import annotations

import re
import unicodedata
from itertools import accumulate, takewhile

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()|~$#!:@])")


def score_text(score: float) -> str:
    """The score with its sign and three significant digits, two beside an exponent of three: at most 9 characters.

    >>> score_text(-0.0123), score_text(4.5e-6), score_text(4.5e-120)
    ('-0.0123', '+4.50e-06', '+4.5e-120')
    """
    if 1e-4 <= abs(score) < 1e4 or score == 0:
        return f"{score:+.3g}"
    return f"{score:+.2e}" if len(f"{score:+.2e}") <= 9 else f"{score:+.1e}"


def short_count(count: float) -> str:
    """
    >>> short_count(950), short_count(1.234e9)
    ('950', '1.23G')
    """
    for unit in ("", "K", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}P"


def short_size(size: float) -> str:
    """
    >>> short_size(1000), short_size(3 * 2**20)
    ('1000 B', '3 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def columns(text: str) -> int:
    """How many columns of a terminal the text takes: two for a wide character (Chinese, emoji), none for a combining one.

    >>> columns("data"), columns("\u6570\u636e"), columns("e\u0301")
    (4, 4, 1)
    """
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def one_line(text: str, width: int) -> str:
    """The text as one line of at most `width` columns: runs of blanks are one space, what cannot be printed is `\ufffd`.

    >>> one_line("def f(x):\\n    return x", 14)
    'def f(x): ret…'
    """
    printable = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return _cut(printable, width)


def excerpt(text: str, *, width: int, lines: int) -> str:
    """The first `lines` lines of the text, each of at most `width` columns; an ellipsis stands for what is left out."""
    found = text.expandtabs(4).splitlines()
    shown = [_cut("".join(c if c.isprintable() else "\ufffd" for c in line), width) for line in found[:lines]]
    if len(found) > lines:
        shown[-1] = _cut(shown[-1] + " …", width)
    return "\n".join(shown)


def _cut(line: str, width: int) -> str:
    if columns(line) <= width:
        return line
    taken = accumulate(map(_columns_of, line))
    return "".join(char for char, _ in takewhile(lambda item: item[1] < width, zip(line, taken, strict=True))) + "…"


def markdown_text(text: str, width: int) -> str:
    """The text on one line for a cell of a Markdown table: no character of it is markup or HTML.

    >>> print(markdown_text("a|b <b>*x*</b>", 20))
    a\\|b &lt;b&gt;\\*x\\*&lt;/b&gt;
    """
    escaped = one_line(text, width).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", escaped)
