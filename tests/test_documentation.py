"""What the documents say is what the program does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.attribution.section import Section
from tests.attribution.test_optimizer_scores import OPTIMIZERS
from tests.metagradient.test_schedules import SCHEDULES
from tests.zoo.tasks import BUILD

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "experiments.md"


def test_the_reference_of_experiment_files_lists_every_field_with_its_description() -> None:
    """Made again by: python -m tests.test_documentation"""
    assert REFERENCE.read_text(encoding="utf-8") == field_reference()


@pytest.mark.parametrize("name", ["own_model.py", "own_model.yaml"])
def test_the_example_in_the_readme_is_the_file_that_is_tested(name: str) -> None:
    text = (ROOT / "experiments" / name).read_text(encoding="utf-8")
    without_heading = text.partition("\n")[2].strip()
    assert without_heading in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_that_the_documents_point_to_is_there() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    missing = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("table", "ids"),
    [
        ("model", list(BUILD)),
        ("optimizer", list(OPTIMIZERS)),
        ("schedule", [*dict.fromkeys(case.partition(" ")[0] for case in SCHEDULES), "table"]),
    ],
)
def test_the_rows_of_the_tables_of_what_is_exact_are_what_the_tests_check(table: str, ids: list[str]) -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.search(rf"^\| {table} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert rows is not None
    assert re.findall(r"^\| ([a-z0-9_-]+) \|", rows[1], flags=re.MULTILINE) == ids


def test_the_tests_that_the_tables_name_are_there() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", (ROOT / "docs" / "models.md").read_text(encoding="utf-8")))
    assert named and named <= {file.name for file in (ROOT / "tests").rglob("test_*.py")}


def field_reference() -> str:
    """The text of docs/experiments.md."""
    lines = [
        "# The experiment file",
        "",
        "One YAML file is one experiment. Relative paths start at its folder. An unknown field is an error that names its line.",
        "",
        "| field | default | meaning |",
        "|---|---|---|",
        *_rows(Experiment, ""),
        "",
    ]
    return "\n".join(lines)


def _rows(section: type[BaseModel], prefix: str) -> list[str]:
    rows: list[str] = []
    for name, field in section.model_fields.items():
        inner = _sections(field)
        rows.append(f"| `{prefix}{name}` | {'' if inner else _default(field)} | {field.description} |")
        for number, chosen in enumerate(inner):
            shown = [row for row in _rows(chosen, f"{prefix}{name}.") if number == 0 or row not in rows]
            rows += shown
    return rows


def _sections(field: FieldInfo) -> list[type[Section]]:
    choices = (field.annotation, *get_args(field.annotation))
    return [choice for choice in choices if isinstance(choice, type) and issubclass(choice, Section)]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "`{}`"
    return "`null`" if field.default is None else f"`{field.default}`"


if __name__ == "__main__":
    REFERENCE.write_text(field_reference(), encoding="utf-8")
