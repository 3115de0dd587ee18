"""What a person reads: the right examples, nothing in a text taken as markup, pictures that are the same each time."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from magic_pipeline import cli
from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.scores import write_scores
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


@pytest.mark.parametrize("scores", [[1.0], [1.0, float("nan")], [[1.0, 2.0]]], ids=str)
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


@pytest.mark.parametrize("width", [50, 60, 100])
def test_the_terminal_table_keeps_to_its_width(width: int) -> None:
    assert max(map(len, terminal_table(shown("id"), width=width).splitlines())) <= width


@pytest.mark.parametrize("kind", ["text", "picture", "id"])
def test_figures_are_pngs_and_the_same_each_time(kind: str) -> None:
    first, again = query_figure(shown(kind)), query_figure(shown(kind))
    assert first.startswith(PNG)
    assert first == again
    assert gallery_figure([shown(kind)] * 2, title="both").startswith(PNG)


def test_a_query_without_any_influential_example_has_a_table_and_a_figure() -> None:
    empty = TopExamples("q", "text", (), ())
    assert "none" in markdown_table(empty)
    assert query_figure(empty).startswith(PNG)
    assert terminal_table(empty)


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
    with pytest.raises(InputError, match="reports"):
        query_figure(shown("picture"))


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
    assert isinstance(top.query, Image.Image)
    assert cli.main(["export", str(path), "--format", "png", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(PNG)
