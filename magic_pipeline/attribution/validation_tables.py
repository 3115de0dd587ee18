"""Validation for people: the tables that the terminal prints, and the same in Markdown. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from magic_pipeline.attribution.linear_datamodeling import LinearDatamodelingScore, QueryLDS

_ID = 40


def validation_lines(content: Mapping[str, Any]) -> list[str]:
    """Everything of `validation.read_validation`; what is not finished is said."""
    lines = list[str]()
    parts: tuple[tuple[str, Callable[[Any], list[str]]], ...] = (
        ("smoothness", _smoothness),
        ("derivative", derivative_lines),
        ("lds", _tables),
        ("removal", removal_lines),
    )
    for part, shown in parts:
        if part in content:
            lines += [f"{part}: not finished"] if content[part] is None else shown(content[part])
            lines.append("")
    return lines[:-1]


def _tables(content: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line for table in content for line in (*lds_lines(LinearDatamodelingScore.from_dict(table)), "")][:-1]


def derivative_lines(content: Mapping[str, Any]) -> list[str]:
    """The scores against two trainings, a line a query."""
    what = f"scores against two trainings with the weights moved by {content['h']:g} along a random direction"
    worst = "undefined" if content["worst"] is None else f"{content['worst']:.2g}"
    verdict = "agrees" if content["holds"] else "DOES NOT AGREE"
    lines = [f"{what}: {verdict}, worst relative error {worst} (tolerance {content['tolerance']:g})"]
    lines.append(f"  {'query':<{_ID}} {'scores':>12} {'trainings':>12} {'error':>9}")
    for row in content["queries"]:
        kinds = (("difference", ".6g"), ("error", ".2g"))
        numbers = ["-" if row[name] is None else format(row[name], kind) for name, kind in kinds]
        lines.append(f"  {_cut(row['query']):<{_ID}} {row['predicted']:>12.6g} {numbers[0]:>12} {numbers[1]:>9}")
    return lines


def _smoothness(content: Mapping[str, Any]) -> list[str]:
    return [smoothness_line(content)]


def lds_lines(table: LinearDatamodelingScore) -> list[str]:
    """One line with the mean, one per query."""
    lines = [summary(table)]
    lines.append(f"  {'query':<{_ID}} {'LDS':>7} {'95 % interval':>17} {'Pearson':>8} {'slope':>7}")
    return lines + [f"  {_cut(row.query):<{_ID}} {_numbers(row)}" for row in table.queries]


def summary(table: LinearDatamodelingScore) -> str:
    """The mean LDS with its interval and everything that qualifies it."""
    what = f"drop {table.drop_fraction:.3g}"
    interval = f"[{table.low:.4f}, {table.high:.4f}]"
    found = f"mean LDS {table.mean:.4f} {interval}" if table.defined else "LDS undefined"
    notes = [f"{table.defined} queries", table.coverage]
    if table.is_partial:
        notes.append("PARTIAL BANK")
    if table.diverged:
        notes.append(f"{len(table.diverged)} diverged ({', '.join(table.diverged[:3])})")
    if table.undefined:
        notes.append(f"{table.undefined} queries undefined, left out of the mean")
    return f"{what}: {found} over {'; '.join(notes)}"


def lds_markdown(tables: Sequence[LinearDatamodelingScore]) -> str:
    """All drop fractions in one document."""
    parts = []
    for table in tables:
        rows = ["| query | LDS | 95 % interval | Pearson | slope |", "|---|---|---|---|---|"]
        for row in table.queries:
            cells = (
                [f"undefined: {row.undefined}", "", "", ""]
                if row.undefined is not None
                else [
                    f"{row.spearman:.4f}",
                    f"{row.low:.4f} to {row.high:.4f}",
                    f"{row.pearson:.4f}",
                    f"{row.slope:.3f}",
                ]
            )
            rows.append("| " + " | ".join([row.query.replace("|", "\\|"), *cells]) + " |")
        parts.append(f"**{summary(table)}**\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def removal_lines(content: Mapping[str, Any]) -> list[str]:
    """Per count, the mean over queries of what happens without the helpful examples, and without random ones."""
    curves = content["curves"]
    partial = (
        "" if content["retrainings"] == content["of"] else f" (PARTIAL: {content['retrainings']} of {content['of']})"
    )
    lines = [
        f"removal curves of {len(curves)} queries{partial}: mean change of the measurement without the k most helpful"
    ]
    lines.append(f"  {'k':>6} {'predicted':>12} {'helpful':>12} {'random':>12}   beats every random removal")
    for at in range(len(curves[0]["points"]) if curves else 0):
        points = [curve["points"][at] for curve in curves]
        whole = [p for p in points if p["actual"] is not None and p["random"]]
        beats = sum(p["actual"] > max(p["random"]) for p in whole)
        drawn = [value for p in whole for value in p["random"]]
        lines.append(
            f"  {points[0]['removed']:>6} {_mean([p['predicted'] for p in points])} "
            f"{_mean([p['actual'] for p in whole])} {_mean(drawn)}   {beats} of {len(whole)} queries"
        )
    return lines


def smoothness_line(content: Mapping[str, Any]) -> str:
    if content["mean"] is None:
        return f"metasmoothness (h {content['h']:g}): undefined, a training did not stay finite or nothing moved"
    each = ", ".join("undefined" if value is None else f"{value:.3f}" for value in content["directions"])
    value, noise = f"metasmoothness (h {content['h']:g}): {content['mean']:.3f}", f"{content['noise']:g}"
    return f"{value} (directions: {each}; differences below {noise} are noise)"


def _numbers(row: QueryLDS) -> str:
    if row.undefined is not None:
        return f"undefined: {row.undefined}"
    return f"{row.spearman:>7.4f} [{row.low:>7.4f},{row.high:>7.4f}] {row.pearson:>8.4f} {row.slope:>7.3f}"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):>12.5f}" if values else f"{'-':>12}"


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ID else line[: _ID - 3] + "..."
