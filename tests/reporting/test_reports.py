"""What a person reads: the right examples, nothing in a text taken as markup, pictures that are the same each time."""

from __future__ import annotations

import base64
import builtins
import io
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from magic_pipeline import cli
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.scores import read_scores, write_scores
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InputError
from magic_pipeline.reporting.figures import gallery_figure, query_figure
from magic_pipeline.reporting.of_experiment import query_top_examples
from magic_pipeline.reporting.tables import markdown_image, markdown_table, terminal_table
from magic_pipeline.reporting.top_examples import Render, ScoredExample, TopExamples, top_examples

PNG = b"\x89PNG\r\n\x1a\n"
NASTY = "a | b\n<script>alert(1)</script> `code` **bold** [link](x) \\| é \N{GRINNING FACE}"


def shown(kind: str) -> TopExamples:
    def render(name: str) -> Render:
        kinds: dict[str, Render] = {
            "text": f"def {name}():\n    return 1",
            "picture": Image.new("L", (8, 8), 128),
            "id": None,
        }
        return kinds[kind]

    return TopExamples(
        "query",
        render("query"),
        tuple(ScoredExample(f"help-{i}", -1.0 / (i + 1), render(f"h{i}")) for i in range(3)),
        tuple(ScoredExample(f"harm-{i}", 1.0 / (i + 1), render(f"x{i}")) for i in range(2)),
    )


def test_the_most_negative_help_and_the_most_positive_harm_ties_in_order_and_zeros_neither() -> None:
    top = top_examples("q", None, ["a", "b", "c", "d", "e", "f"], [0.5, -2.0, 0.0, -2.0, 3.0, -1.0], count=2)
    assert [example.id for example in top.helpful] == ["b", "d"]
    assert [example.id for example in top.harmful] == ["e", "a"]


def test_only_the_chosen_examples_are_rendered() -> None:
    asked: list[int] = []
    top_examples("q", None, list("abcd"), [1.0, -1.0, 0.5, -0.5], count=1, render=lambda index: asked.append(index))
    assert sorted(asked) == [0, 1]


@pytest.mark.parametrize("scores", [[1.0], [1.0, float("nan")], [float("-inf"), 1.0], [[1.0, 2.0]]], ids=str)
def test_scores_that_are_not_one_finite_number_an_id_are_refused(scores: Any) -> None:
    with pytest.raises(InputError):
        top_examples("q", None, ["a", "b"], scores)


def test_text_in_a_markdown_table_is_text() -> None:
    top = TopExamples(NASTY, NASTY, (ScoredExample(NASTY, -1.0, NASTY),), ())
    table = markdown_table(top)
    assert "<script>" not in table
    assert "**bold**" not in table.replace("**Most", "")
    rows = [line for line in table.splitlines() if line.startswith("| 1 ")]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 5


def test_long_ids_and_texts_are_cut() -> None:
    top = TopExamples("q" * 300, None, (ScoredExample("i" * 300, -1.0, "t" * 5000),), ())
    assert max(map(len, markdown_table(top).splitlines())) < 400
    assert max(map(len, terminal_table(top, width=80).splitlines())) <= 80


def occupied(line: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in line)
    return len(line) + wide - sum(unicodedata.category(char) in ("Mn", "Me") for char in line)


IDS = st.text(st.sampled_from("aé \n\t|\x00\u0301\u6570\U0001f600\u200b\ud800"), max_size=90) | st.text(max_size=90)
SCORES = st.floats(allow_nan=False, allow_infinity=False).filter(lambda score: score != 0)


@given(
    query=IDS,
    helpful=st.lists(st.tuples(IDS, SCORES), max_size=3),
    harmful=st.lists(st.tuples(IDS, SCORES), max_size=3),
    width=st.integers(50, 120),
)
@settings(max_examples=100, deadline=None)
def test_the_terminal_table_keeps_to_its_width_whatever_the_ids_and_scores(
    query: str, helpful: list[tuple[str, float]], harmful: list[tuple[str, float]], width: int
) -> None:
    low, high = (tuple(ScoredExample(*pair) for pair in side) for side in (helpful, harmful))
    top = TopExamples(query, None, low, high)
    lines = terminal_table(top, width=width).split("\n")
    assert len(lines) == 2 + max(len(helpful), len(harmful), 1)
    assert max(map(occupied, lines)) <= width
    assert all(line.isprintable() for line in lines)
    if harmful:
        assert {occupied(line) for line in lines[2 : 2 + len(harmful)]} == {occupied(lines[1])}


def test_long_ids_of_wide_characters_are_cut_to_their_column_and_scores_stay_in_line() -> None:
    top = TopExamples("q", None, (ScoredExample("\u6570\u636e" * 150, -0.5), ScoredExample("doc-1", -0.25)), ())
    first, second = terminal_table(top, width=60).splitlines()[2:]
    assert "\u6570" in first
    assert "…" in first
    assert occupied(first) == occupied(second)
    assert first.endswith("-0.5")


@pytest.mark.parametrize("text", ["", " ", "a|b\\|c\\", "- item", "`", "a\x00\x1b[31m\u202e\ud800", "\r\n\u2028"])
def test_any_text_stays_in_one_cell_of_its_row(text: str) -> None:
    table = markdown_table(TopExamples(text, text, (ScoredExample(text, -1.0, text),), ()))
    lines = table.split("\n\n")[1].split("\n")
    assert len(lines) == 3
    assert [len(re.findall(r"(?:\\.|[^|\\])*\|", line)) for line in lines] == [5, 5, 5]
    assert all(line.isprintable() for line in lines)
    table.encode()


def test_a_picture_in_a_markdown_table_is_a_thumbnail() -> None:
    picture = Image.linear_gradient("L").resize((900, 300))
    table = markdown_table(TopExamples("q", picture, (ScoredExample("a", -1.0, picture),), ()))
    found = re.search(r"data:image/png;base64,([A-Za-z0-9+/=]+)", table)
    assert found
    with Image.open(io.BytesIO(base64.b64decode(found[1]))) as thumbnail:
        assert thumbnail.size == (48, 16)
    assert picture.size == (900, 300)


@pytest.mark.parametrize("kind", ["text", "picture", "id"])
def test_figures_are_pngs_and_the_same_each_time(kind: str) -> None:
    first, again = query_figure(shown(kind)), query_figure(shown(kind))
    assert first.startswith(PNG)
    assert first == again
    galleries = {gallery_figure([shown(kind)] * 2, title="both") for _ in range(2)}
    assert len(galleries) == 1
    with Image.open(io.BytesIO(galleries.pop())) as picture:
        picture.load()


def test_other_scores_or_pictures_give_other_figures() -> None:
    def figure(score: float, grey: int) -> bytes:
        return query_figure(TopExamples("q", None, (ScoredExample("a", score, Image.new("L", (8, 8), grey)),), ()))

    assert len({figure(-1.0, 128), figure(-2.0, 128), figure(-1.0, 90)}) == 3


@pytest.mark.parametrize(
    "text", [NASTY, "$x^$ \\frac{", "\u6570\u636e \u0627\u0644", "a\x00\x1b[31m\ud800", "x" * 20_000, "\n\n"]
)
def test_any_text_can_be_drawn(text: str) -> None:
    top = TopExamples(text, text, (ScoredExample(text, -1.0, text),), (ScoredExample("b", 1e-120, None),))
    assert query_figure(top).startswith(PNG)
    assert gallery_figure([top], title=text[:300]).startswith(PNG)


def test_a_query_without_any_influential_example_has_a_table_and_a_figure() -> None:
    empty = TopExamples("q", "text", (), ())
    assert "none" in markdown_table(empty)
    assert query_figure(empty).startswith(PNG)
    assert terminal_table(empty).endswith("none")
    assert gallery_figure([empty]).startswith(PNG)
    assert top_examples("q", None, ["a", "b"], [0.0, -0.0]) == TopExamples("q", None, (), ())


def test_a_picture_in_markdown_needs_no_other_file() -> None:
    assert markdown_image(b"1234", "a picture").startswith("![a picture](data:image/png;base64,")


def test_a_gallery_of_no_query_is_refused() -> None:
    with pytest.raises(InputError):
        gallery_figure([])


def test_without_matplotlib_a_figure_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **settings: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("importlib.import_module", without)
    for kind in ("picture", "text", "id"):
        with pytest.raises(InputError, match=r"magic-pipeline\[reports\]") as caught:
            query_figure(shown(kind))
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(InputError, match=r"magic-pipeline\[reports\]"):
        gallery_figure([shown("text")])
    assert "help-0" in markdown_table(shown("text"))


def test_a_finished_experiment_has_top_examples_and_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "digits.yaml"
    path.write_text(
        "name: digits\ntask: {type: digits_classifier, hidden: 4, train_size: 40}\n"
        "training: {epochs: 1, batch_size: 20}\nqueries: {split: test, count: 2}\nattribution: {threads: 1, chunk: 2}\n"
    )
    picture = tmp_path / "picture.png"
    assert cli.main(["export", str(path), "--format", "png", "--output", str(picture)]) == 2
    opened = open_experiment(load_experiment(path))
    train(opened)
    walk(opened, [query.key for query in opened.queries])
    for query in opened.queries:
        write_scores(opened, query.key)
    top = query_top_examples(opened, opened.queries[0].key, count=3)
    assert top.query_id == opened.queries[0].id
    assert [len(top.helpful), len(top.harmful)] == [3, 3]
    table = read_scores(opened, opened.queries[0].key)
    worst = int(table.scores.argmax())
    assert (top.harmful[0].id, top.harmful[0].score) == (table.ids[worst], table.scores[worst])
    pixels = opened.task.render(opened.dataset[opened.dataset.ids.index(table.ids[worst])])  # type: ignore[attr-defined]
    assert isinstance(top.harmful[0].render, Image.Image)
    assert top.harmful[0].render.tobytes() == pixels.tobytes()
    unseen = query_top_examples(opened, opened.queries[0].key, count=3, rendered=False)
    assert [example.id for example in unseen.harmful] == [example.id for example in top.harmful]
    assert {example.render for example in (*unseen.helpful, *unseen.harmful)} == {None}
    with pytest.raises(InputError):
        query_top_examples(opened, "no-such-query")
    assert isinstance(top.query, Image.Image)
    assert cli.main(["export", str(path), "--format", "png", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(PNG)
