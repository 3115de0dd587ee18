"""From a `task:` section to a Task, and every way in which that can be the user's mistake."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.errors import InputError
from magic_pipeline.tasks import protocol
from magic_pipeline.tasks.protocol import QuerySource

SOURCE = """
class Complete:
    def __init__(self, size: int, scale: float = 1.0):
        if size < 0:
            raise ValueError("size is below 0")
        self.size, self.scale = size, scale
    def build_model(self): ...
    def training_data(self): ...
    def queries(self): ...
    def collate(self, examples): ...
    def example_losses(self, model, batch): ...

class Asking(Complete):
    def __init__(self, queries=None, folder=None):
        self.source, self.folder = queries, folder

class AnySetting(Complete):
    def __init__(self, **settings):
        self.settings = settings

class Incomplete:
    def build_model(self): ...
    def queries(self): ...

not_a_class = 1
"""


def load_task(name: str, settings: dict[str, Any], *, folder: Path, queries: QuerySource | None) -> Any:
    return protocol.load_task(name, settings, folder=folder, queries=queries)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with `<name>.py` in it, the name being the test's own, since Python keeps one module per name."""
    (tmp_path / f"{module_name(request)}.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def module(request: pytest.FixtureRequest) -> str:
    return module_name(request)


def module_name(request: pytest.FixtureRequest) -> str:
    return "".join(char if char.isalnum() else "_" for char in request.node.name)


def test_a_class_beside_the_experiment_file_is_found(folder: Path, module: str) -> None:
    path = list(sys.path)
    task = load_task(f"{module}:Complete", {"size": 3}, folder=folder, queries=None)
    assert (task.size, task.scale) == (3, 1.0)
    assert sys.path == path


def test_queries_and_folder_go_to_a_class_that_names_them(folder: Path, module: str) -> None:
    task = load_task(f"{module}:Asking", {}, folder=folder, queries=QuerySource(file=Path("q.jsonl")))
    assert task.folder == folder
    assert task.source == QuerySource(file=folder / "q.jsonl")
    assert load_task(f"{module}:Asking", {}, folder=folder, queries=None).source is None


def test_a_class_with_keyword_arguments_takes_any_setting(folder: Path, module: str) -> None:
    assert load_task(f"{module}:AnySetting", {"a": 1}, folder=folder, queries=None).settings == {"a": 1}


@pytest.mark.parametrize(
    ("name", "settings", "field", "message"),
    [
        ("{}:Complete", {"size": 1, "scal": 2.0}, "task.scal", "has no such setting; it has: scale, size"),
        ("{}:Complete", {}, "task.size", "needs this setting"),
        ("{}:Complete", {"size": -1}, "task", "refuses its settings: size is below 0"),
        ("{}:Complete", {"size": "x"}, "task", "refuses its settings: '<' not supported"),
        ("{}:Asking", {"folder": "x"}, "task.folder", "this name is reserved"),
        ("{}:Missing", {}, "task.type", "has no class Missing"),
        ("{}:not_a_class", {}, "task.type", "has no class not_a_class"),
        ("{}:Incomplete", {}, "task.type", "is not a Task: it has no training_data, collate, example_losses"),
        ("{}.inner:Complete", {}, "task.type", "no module {}.inner in"),
        ("nowhere_at_all:Complete", {}, "task.type", "no module nowhere_at_all in"),
        (
            "digit_classifier",
            {},
            "task.type",
            "give one of causal_lm, causal_lm_text, digits_classifier, image_classifier, linear_regression, or",
        ),
        ("../x:Complete", {}, "task.type", "expected package.module:name, found '../x:Complete'"),
        ("linear_regression", {"feature": 3}, "task.feature", "it has: data, data_seed, examples, features"),
    ],
)
def test_a_wrong_task_section_is_refused_by_field(
    folder: Path, module: str, name: str, settings: dict[str, object], field: str, message: str
) -> None:
    with pytest.raises(InputError) as raised:
        load_task(name.format(module), settings, folder=folder, queries=None)
    assert raised.value.field == field
    assert message.format(module) in str(raised.value)


def test_queries_that_the_task_would_ignore_are_refused(folder: Path, module: str) -> None:
    with pytest.raises(InputError, match=r"queries: .*brings its own queries") as raised:
        load_task(f"{module}:Complete", {"size": 1}, folder=folder, queries=QuerySource(split="test"))
    assert raised.value.field == "queries"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import a_package_nobody_has", "needs a_package_nobody_has, which is not installed"),
        ("def f(:", "fails with SyntaxError"),
        ("1 / 0", "fails with ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, module: str, source: str, message: str) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(InputError, match=message):
        load_task(f"{module}:Any", {}, folder=tmp_path, queries=None)
    assert module not in sys.modules


def test_two_folders_modules_of_one_name_are_never_mixed_up(folder: Path, module: str, tmp_path: Path) -> None:
    load_task(f"{module}:Complete", {"size": 1}, folder=folder, queries=None)
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{module}.py").write_text(SOURCE)
    with pytest.raises(InputError, match=r"already uses .* by that name; rename one"):
        load_task(f"{module}:Complete", {"size": 1}, folder=other, queries=None)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(InputError, match=r"digits_classifier needs sklearn: .*magic-pipeline\[digits\]"):
        load_task("digits_classifier", {}, folder=tmp_path, queries=None)
