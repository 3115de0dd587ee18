"""The contract on memory://."""

from __future__ import annotations

import uuid

import pytest

from tests.checkpoints.contract import ChainContract, StoreContract
from tests.checkpoints.sink_contract import SinkContract


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/store"


class TestMemorySink(SinkContract):
    keeps_unfinished = False


class TestMemoryStore(StoreContract):
    pass


class TestMemoryChain(ChainContract):
    pass
