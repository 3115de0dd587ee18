"""One self-contained HTML page of an experiment: no script, no other file, no address. Everything that users wrote is escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magic_pipeline.attribution.costs import costs
from magic_pipeline.attribution.linear_datamodeling import LinearDatamodelingScore
from magic_pipeline.attribution.score_table import SIGN_CONVENTION, ScoreTable
from magic_pipeline.attribution.scores import read_scores
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.token_columns import TokensOfUnit
from magic_pipeline.attribution.trajectory import required_trajectory
from magic_pipeline.attribution.validation import read_validation
from magic_pipeline.attribution.validation_tables import summary, validation_lines
from magic_pipeline.errors import InputError
from magic_pipeline.reporting.charts import distribution_chart, loss_chart, prediction_chart, steps_chart
from magic_pipeline.reporting.of_experiment import last_steps, query_top_examples
from magic_pipeline.reporting.text import score_text, short_count, short_size
from magic_pipeline.reporting.top_examples import Render, ScoredExample
from magic_pipeline.tasks.extras import import_extra

if TYPE_CHECKING:
    from magic_pipeline.attribution.opening import OpenExperiment

_LONGEST = 4000  # characters of an example
_MOST_TOKENS = 1000


@dataclass(frozen=True)
class RunCost:
    """What Dagster's runs of one asset took; `seconds` from their start to their end."""

    asset: str
    runs: int
    unsuccessful: int
    retries: int
    seconds: float


def html_report(
    opened: OpenExperiment,
    *,
    ids: Sequence[str] | None = None,
    count: int = 5,
    most: int = 50,
    runs: Sequence[RunCost] = (),
) -> str:
    """The page.

    Args:
        ids: the queries to show; by default the first `most` that have scores.
        count: examples a side.
        runs: what Dagster says, where there is an instance.

    Raises:
        InputError: there is no such query with scores, or the extra `reports` is not installed.
        MagicError: training is not complete.
    """
    jinja2 = import_extra("jinja2", extra="reports", needed_by="a report")
    trajectory = required_trajectory(opened)
    finished = {status.id: status.key for status in query_statuses(opened) if status.scores_digest is not None}
    for id_ in ids or ():
        if id_ not in finished:
            raise InputError(f"the query {id_!r} has no scores; {len(finished)} queries have", field="queries")
    chosen = list(finished if ids is None else ids)[: most if ids is None else None]
    validation = read_validation(opened)
    tables = [LinearDatamodelingScore.from_dict(table) for table in validation.get("lds") or ()]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("magic_pipeline.reporting", ""),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
    )
    page: str = environment.get_template("report.html.j2").render(
        name=opened.experiment.name,
        sign=SIGN_CONVENTION,
        facts=_facts(opened, dict(trajectory.versions)),
        loss=_data_uri(loss_chart(trajectory.losses)),
        validation="\n".join(validation_lines(validation)),
        predictions=[
            {"picture": _data_uri(prediction_chart(t.predicted, t.actual)), "title": summary(t)}
            for t in tables
            if t.subsets
        ],
        costs=[
            {
                "what": c.what,
                "steps": f"{c.steps:,}",
                "redone": f"{c.redone:,}",
                "flops": short_count(c.flops),
                "bytes": short_size(c.bytes),
            }
            for c in costs(opened)
        ],
        runs=[vars(row) | {"time": f"{row.seconds:,.0f} s"} for row in runs],
        finished=len(finished),
        shown=len(chosen),
        queries=[_query(opened, finished[id_], count) for id_ in chosen],
    )
    return page


def _facts(opened: OpenExperiment, versions: dict[str, str]) -> list[tuple[str, str]]:
    parameters = sum(tensor.numel() for tensor in opened.initial_state.params.values())
    return [
        (
            "training",
            f"{opened.steps:,} steps over {len(opened.dataset):,} examples, {parameters:,} trainable parameters",
        ),
        ("queries", f"{len(opened.queries):,}"),
        ("fingerprint", opened.fingerprint),
        ("data", str(opened.dataset.digest)),
        ("storage", f"{opened.store.url}/{opened.folder}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


def _query(opened: OpenExperiment, key: str, count: int) -> dict[str, Any]:
    top, table = query_top_examples(opened, key, count=count), read_scores(opened, key)
    return {
        "id": top.query_id,
        "render": _look(top.query),
        "headings": top.headings,
        "helpful": [_example(opened, table, example) for example in top.helpful],
        "harmful": [_example(opened, table, example) for example in top.harmful],
        "distribution": _data_uri(distribution_chart(table.scores)),
        "steps": _data_uri(steps_chart(last_steps(opened), table.scores)),
    }


def _example(opened: OpenExperiment, table: ScoreTable, example: ScoredExample) -> dict[str, Any]:
    look = _look(example.render) if table.tokens is None else _tokens(opened, table.tokens_of(example.id))
    return {"id": example.id, "score": score_text(example.score), "render": look}


def _tokens(opened: OpenExperiment, found: TokensOfUnit) -> dict[str, Any]:
    """An example's tokens, each shaded by its score: the largest of them is as dark as it gets."""
    scores, ids = found.scores[:_MOST_TOKENS], [int(token) for token in found.ids[:_MOST_TOKENS]]
    texts = opened.task.token_text(ids) if hasattr(opened.task, "token_text") else [f"{token} " for token in ids]
    largest = max(map(abs, scores), default=0.0) or 1.0
    shaded = [
        {
            "text": text,
            "score": score_text(float(score)),
            "side": "h" if score < 0 else "x",
            "dark": abs(float(score)) / largest,
        }
        for text, score in zip(texts, scores, strict=True)
    ]
    more = len(found.ids) - len(ids)
    return {"tokens": shaded, "more": f" … and {more:,} tokens more" if more else "", "text": "", "picture": ""}


def _look(render: Render) -> dict[str, Any] | None:
    if render is None:
        return None
    if isinstance(render, str):
        shown = render if len(render) <= _LONGEST else f"{render[:_LONGEST]} … ({len(render):,} characters)"
        return {"text": shown, "picture": "", "tokens": ()}
    with io.BytesIO() as file:
        render.convert("RGB").save(file, format="PNG")
        return {"picture": _data_uri(file.getvalue()), "text": "", "tokens": ()}


def _printable(value: Any) -> Any:
    """Texts without control characters; what is markup already stays as it is."""
    if type(value) is not str:
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in value)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
