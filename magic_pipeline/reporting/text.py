"""Other people's text made safe to show: ids and documents hold any Unicode, control characters and markup included."""

from __future__ import annotations

import re

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()|~$#!:@])")


def score_text(score: float) -> str:
    """The score with its sign and three significant digits: `-0.0123`, `+4.50e-06`.

    >>> score_text(-0.0123), score_text(4.5e-6)
    ('-0.0123', '+4.50e-06')
    """
    return f"{score:+.3g}" if 1e-4 <= abs(score) < 1e4 or score == 0 else f"{score:+.2e}"


def one_line(text: str, width: int) -> str:
    """The text as one line of at most `width` characters: runs of blanks are one space, what cannot be printed is `\ufffd`.

    >>> one_line("def f(x):\\n    return x", 14)
    'def f(x): ret…'
    """
    printable = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return printable if len(printable) <= width else printable[: width - 1] + "…"


def excerpt(text: str, *, width: int, lines: int) -> str:
    """The first `lines` lines of the text, each of at most `width` characters; an ellipsis stands for what is left out."""
    found = text.expandtabs(4).splitlines()
    shown = [_cut("".join(c if c.isprintable() else "\ufffd" for c in line), width) for line in found[:lines]]
    if len(found) > lines:
        shown[-1] = _cut(shown[-1] + " …", width)
    return "\n".join(shown)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def markdown_text(text: str, width: int) -> str:
    """The text on one line for a cell of a Markdown table: no character of it is markup or HTML.

    >>> print(markdown_text("a|b <b>*x*</b>", 20))
    a\\|b &lt;b&gt;\\*x\\*&lt;/b&gt;
    """
    escaped = one_line(text, width).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", escaped)
