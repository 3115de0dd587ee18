"""From the experiment file's `task:` section to a Task. No torch here: a task's module is imported when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magic_pipeline.errors import InputError, MagicError
from magic_pipeline.tasks.query_source import QuerySource

if TYPE_CHECKING:
    from magic_pipeline.tasks.protocol import Task

REGISTERED: Mapping[str, str] = {
    "causal_lm": "magic_pipeline.tasks.finetuning:CausalLM",
    "causal_lm_text": "magic_pipeline.tasks.causal_lm:CausalLMText",
    "image_classifier": "magic_pipeline.tasks.images:ImageClassifier",
    "digits_classifier": "magic_pipeline.tasks.digits:DigitsClassifier",
    "linear_regression": "magic_pipeline.tasks.linear_regression:LinearRegression",
}
# What the loader itself passes, to a class whose constructor names it.
FROM_LOADER = ("queries", "folder")


def load_task(task_type: str, settings: Mapping[str, Any], *, folder: Path, queries: QuerySource | None) -> Task:
    """The task of an experiment, built as `cls(**settings)`.

    Args:
        task_type: a registered name, or `package.module:ClassName`; modules in `folder` can be imported.
        settings: the other fields of the `task:` section.
        folder: the experiment file's folder; passed as `folder=` if the constructor names that parameter.
        queries: the `queries:` section; passed as `queries=` if the constructor names that parameter.

    Raises:
        InputError: the module, class, a setting or a required method is not there, the constructor refuses a value, or
            the experiment has a `queries:` section that the task would ignore.
    """
    cls = _find_class(task_type, folder)
    accepted = inspect.signature(cls).parameters
    _check_settings(task_type, settings, accepted)
    if queries is not None and "queries" not in accepted:
        raise InputError(
            f"{task_type} brings its own queries and takes no queries: section; remove it", field="queries"
        )
    given = {"queries": _absolute(queries, folder), "folder": folder}
    extra = {name: given[name] for name in FROM_LOADER if name in accepted}
    try:
        task: Task = cls(**settings, **extra)
    except (TypeError, ValueError) as error:
        raise InputError(f"{task_type} refuses its settings: {error}", field="task") from error
    from magic_pipeline.tasks.protocol import REQUIRED_METHODS

    if missing := [name for name in REQUIRED_METHODS if not callable(getattr(task, name, None))]:
        raise InputError(f"{task_type} is not a Task: it has no {', '.join(missing)}", field="task.type")
    return task


def _absolute(queries: QuerySource | None, folder: Path) -> QuerySource | None:
    if queries is None or queries.file is None:
        return queries
    return QuerySource(file=folder / queries.file)


def _check_settings(task_type: str, settings: Mapping[str, Any], accepted: Mapping[str, inspect.Parameter]) -> None:
    for name in FROM_LOADER:
        if name in settings:
            raise InputError("this name is reserved: it does not belong in the task: section", field=f"task.{name}")
    own = {name: parameter for name, parameter in accepted.items() if name not in FROM_LOADER}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    named = {name: parameter for name, parameter in own.items() if parameter.kind in _BY_KEYWORD}
    if not takes_any and (unknown := sorted(set(settings) - set(named))):
        known = ", ".join(sorted(named)) or "none"
        raise InputError(f"{task_type} has no such setting; it has: {known}", field=f"task.{unknown[0]}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in settings:
            raise InputError(f"{task_type} needs this setting", field=f"task.{name}")


_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _find_class(task_type: str, folder: Path) -> Any:
    path = REGISTERED.get(task_type, task_type)
    if ":" not in path:
        names = ", ".join(sorted(REGISTERED))
        raise InputError(f"no task {task_type!r}; give one of {names}, or package.module:ClassName", field="task.type")
    cls = find_object(path, folder, field="task.type", kind="class")
    if not inspect.isclass(cls):
        module_name, class_name = path.split(":")
        module = sys.modules[module_name]
        raise InputError(f"module {module_name} ({module.__file__}) has no class {class_name}", field="task.type")
    return cls


def find_object(reference: str, folder: Path, *, field: str, kind: str = "callable") -> Any:
    """What `package.module:name` names; modules in `folder` can be imported.

    Raises:
        InputError: it has another form, or there is no such module or name; `field` is at fault.
    """
    if not isinstance(reference, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", reference):
        raise InputError(f"expected package.module:name, found {reference!r}", field=field)
    module_name, name = reference.split(":")
    with _importable(folder):
        _refuse_namesake(module_name, folder, field)
        module = _import(module_name, folder, field)
    if not hasattr(module, name):
        raise InputError(f"module {module_name} ({module.__file__}) has no {kind} {name}", field=field)
    return getattr(module, name)


def _import(module_name: str, folder: Path, field: str) -> Any:
    importlib.invalidate_caches()  # the file may be younger than the import system's directory listing
    try:
        return importlib.import_module(module_name)
    except MagicError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(f"no module {error.name} in {folder} or installed", field=field) from error
        raise InputError(f"module {module_name} needs {error.name}, which is not installed", field=field) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"importing module {module_name} fails with {reason}", field=field) from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _refuse_namesake(module_name: str, folder: Path, field: str) -> None:
    """Python keeps one module per name: a second folder with a module of that name would silently get the first's."""
    top = module_name.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    here = [path.resolve() for path in (folder / f"{top}.py", folder / top / "__init__.py") if path.is_file()]
    if loaded is not None and here and Path(loaded).resolve() not in here:
        message = f"module {top} is in {here[0]}, but this process already uses {loaded} by that name; rename one"
        raise InputError(message, field=field)
