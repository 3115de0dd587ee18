"""How the contracts are run: against which storage, and which of their cases where every request takes its time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from magic_pipeline.checkpoints import Store, s3_sink


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "repeats: one of many alike cases, left out in classes that say `slow = True`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the cases marked `repeats` out of slow classes; `cases` in the contract makes them."""

    def is_left_out(item: pytest.Item) -> bool:
        return bool(item.get_closest_marker("repeats")) and getattr(getattr(item, "cls", None), "slow", False)

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


@pytest.fixture(autouse=True)
def soon_out_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that does not answer fails a test in seconds."""
    monkeypatch.setenv("MAGIC_STORAGE_PATIENCE_SECONDS", "20")


_connections: dict[str, Any] = {}


@pytest.fixture
def connect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection to S3 for each endpoint and login: making it takes botocore longer than most tests take."""
    connect = s3_sink._connect

    def cached(options: dict[str, Any]) -> Any:
        if "key" not in options:  # then the login is the environment's, which changes between tests
            return connect(options)
        name = json.dumps(options, sort_keys=True)
        if name not in _connections:
            _connections[name] = connect(options)
        return _connections[name]

    monkeypatch.setattr(s3_sink, "_connect", cached)


@pytest.fixture
def options() -> dict[str, Any]:
    """The storage options that belong to the `url` of a test file."""
    return {}


@pytest.fixture
def open_store(url: str, options: dict[str, Any]) -> Callable[[], Store]:
    """Opens the test's storage anew, as another process would."""
    return lambda: Store(url, options=options)


@pytest.fixture
def store(open_store: Callable[[], Store]) -> Store:
    return open_store()
