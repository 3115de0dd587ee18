"""Which versions of what can change a last bit are installed here."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from magic_pipeline.version import __version__


def versions() -> dict[str, str]:
    """Versions of what can change a last bit, and of this project."""
    found = {"magic_pipeline": __version__, "torch": torch.__version__}
    for package in ("numpy", "transformers", "peft"):
        installed = _installed(package)
        if installed is not None:
            found[package] = installed
    return found


@cache
def _installed(package: str) -> str | None:
    """Its version. Remembered: looking it up takes longer than a step of a small model."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
