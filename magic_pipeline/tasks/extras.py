"""Importing what only some tasks need."""

from __future__ import annotations

import importlib
from typing import Any

from magic_pipeline.errors import InputError


def import_extra(module: str, *, extra: str, needed_by: str) -> Any:
    """The module, or an InputError that says which of the project's extras brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        message = f"{needed_by} needs {package}: python -m pip install 'magic-pipeline[{extra}]'"
        raise InputError(message) from error
