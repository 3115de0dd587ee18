"""One page that needs nothing else, says what was found and what it cost, and shows other people's text as text."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import pytest

from magic_pipeline import cli
from magic_pipeline.attribution.costs import costs
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.training import step_flops, train
from magic_pipeline.attribution.validation import retrain_subsets, write_lds
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InputError, InterruptedWalkError, MagicError
from magic_pipeline.reporting.html_report import RunCost, html_report
from magic_pipeline.reporting.tables import markdown_table, terminal_table
from magic_pipeline.reporting.top_examples import top_examples
from tests.attribution.running import keys, open_small, run, stop_after
from tests.attribution.small_task import SmallTask

NASTY = "</div><script>alert('owned')</script>{{ 7 * 7 }} <img src=http://evil.example/x onerror=alert(1)> & é \x00"


class Nasty(SmallTask):
    """Ids and examples that would like to be markup."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(query_ids=(NASTY, "second"), **settings)

    def render(self, example: Any) -> str:
        return f"{NASTY} {float(example[0][0]):.3f}"


class Page(html.parser.HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def nasty(folder: Path, **changes: Any) -> OpenExperiment:
    return open_small(folder, task={"type": f"{__name__}:Nasty"}, **changes)


def test_everything_that_users_wrote_is_shown_as_text_and_nothing_is_fetched(tmp_path: Path) -> None:
    opened = nasty(tmp_path)
    run(opened)
    page = Page(html_report(opened, count=2))
    assert "script" not in page.tags and page.text.count("<script>alert('owned')</script>{{ 7 * 7 }}") >= 1 + 2 * 3
    assert page.addresses and all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert "\x00" not in page.text
    assert page.text.count("most helpful") == 2 and "query second" in page.text
    assert re.search(r"negative score means that more weight", page.text)


def test_validation_and_dagsters_runs_are_on_the_page_where_they_are_there(tmp_path: Path) -> None:
    opened = open_small(tmp_path, validation={"lds": {"subsets": 5, "drop_fraction": 0.25}})
    run(opened)
    without = Page(html_report(opened)).text
    assert "lds: not finished" in without and "Dagster's runs" not in without
    retrain_subsets(opened)
    write_lds(opened)
    found = Page(html_report(opened, runs=[RunCost("segment_checkpoints", 3, 1, 2, 61.2)])).text
    assert "drop 0.25: mean LDS" in found and "over 3 queries; 5 subsets" in found
    assert (
        re.search(r"segment_checkpoints\s*3\s*1\s*2\s*61 s", re.sub(r"\s+", " ", found).replace(" ", "\n"))
        or "61 s" in found
    )


def test_only_the_chosen_queries_are_shown_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    with pytest.raises(MagicError, match="training"):
        html_report(opened)
    train(opened)
    assert "No query is finished yet." in html_report(opened)
    run(opened)
    page = html_report(opened, ids=["second"])
    assert "query second" in page and "query first" not in page and "1 of 3 shown" in page
    assert "2 of 3 shown" in html_report(opened, most=2)
    with pytest.raises(InputError, match="'fourth' has no scores; 3 queries have"):
        html_report(opened, ids=["fourth"])


def test_costs_count_what_was_begun_what_was_begun_twice_and_the_flops_that_queries_share(tmp_path: Path) -> None:
    opened = open_small(tmp_path)
    train(opened)
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened)[:2], should_stop=stop_after(4))
    walk(opened, keys(opened)[:2])
    walk(opened, keys(opened)[2:])
    training, first, second, third = costs(opened)
    step = step_flops(opened)
    assert (training.what, training.steps, training.redone, training.flops) == ("training", 6, 0, 6 * step)
    # Stopped after 3 of 6 steps, and sealed there; the segment from 4 to 2 was begun again from step 3.
    assert (first.steps, first.redone) == (second.steps, second.redone) == (7, 1)
    assert first.flops == second.flops == pytest.approx(7 * step * 3)
    assert (third.steps, third.redone, third.flops) == (6, 0, 6 * step * 4)
    assert min(cost.bytes for cost in (training, first, third)) > 500


def test_the_command_writes_the_page_and_refuses_what_is_no_file_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(open_small(tmp_path))
    path = str(tmp_path / "small.yaml")
    assert cli.main(["report", path, "--output", str(tmp_path / "page.html"), "--queries", "third"]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert cli.main(["report", path, "--output", str(tmp_path)]) == 2
    assert "should be a file in a folder that exists" in capsys.readouterr().err


def test_tokens_are_shaded_by_their_scores_and_named_measurements_are_not_called_help(tmp_path: Path) -> None:
    opened = open_small(
        tmp_path, task={"type": "tests.attribution.sequence_task:SequenceTask"}, attribution={"unit": "token"}
    )
    run(opened)
    text = html_report(opened, count=2)
    assert re.search(r'<span class="[hx]" style="--dark: 1.000" title="[+-]', text)
    shades = [float(one) for one in re.findall(r"--dark: ([0-9.]+)\"", text)]
    assert len(shades) > 20 and 0 <= min(shades) < 0.9
    assert "most helpful" in text
    top = top_examples("q", None, ["a", "b"], [1.0, -1.0], measurement="log_odds")
    assert top.headings == ("lower log_odds most", "raise log_odds most")
    assert "helpful" not in markdown_table(top) + terminal_table(top) + " ".join(top.explanations)
