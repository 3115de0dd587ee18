"""How a lease ends when the storage is away, or something raises where nobody expects it: neither hides why the work ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.checkpoints import Chain, Store
from magic_pipeline.checkpoints import heartbeat as heartbeats
from magic_pipeline.checkpoints.patience import Patience, TransientError, at_most
from magic_pipeline.errors import StorageError
from tests.checkpoints.contract import FACTS, Preempted, state
from tests.servers.faulty import FaultyProxy, faulty
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.usefixtures("connect_once")


@pytest.fixture
def proxy(moto_s3: S3Server) -> Iterator[FaultyProxy]:
    with faulty(moto_s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def away(moto_s3: S3Server, proxy: FaultyProxy) -> Store:
    """A store on S3 whose server can go away."""
    return Store(moto_s3.bucket_url(), options=moto_s3.behind(proxy.endpoint_url).options)


def test_an_interrupt_is_not_hidden_by_a_lease_that_cannot_be_given_back(
    away: Store, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "TO_LET_GO", 0.5)
    leases = [Chain(away, f"q{number}", writers="writers").take() for number in range(3)]

    def work() -> None:
        with leases[0], leases[1], leases[2]:
            proxy.stop()
            raise Preempted

    began = time.monotonic()
    with pytest.raises(Preempted):
        work()
    assert time.monotonic() - began < 10, "an end waits for storage as long as work would"
    assert caplog.text.count("is not given back, and ends with this process") == 3
    proxy.start()
    with Chain(away, "q0", writers="writers").take() as again:
        assert again.epoch == 2


def test_work_that_is_sealed_does_not_fail_for_a_lease_that_cannot_be_given_back(
    away: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "TO_LET_GO", 0.5)
    chain = Chain(away, "q", writers="writers")
    with chain.take() as lease:
        lease.seal(4, {"rank0": state(4)}, FACTS)
        proxy.stop()
    proxy.start()
    found = chain.newest(FACTS, order="lowest")
    assert found and found.step == 4


def test_the_limit_of_patience_is_this_threads_and_ends_with_its_context() -> None:
    def fail() -> None:
        raise TransientError("away")

    def tried(patience: Patience) -> float:
        began = time.monotonic()
        with pytest.raises(StorageError, match="given up"):
            patience.outlast(fail, "x")
        return time.monotonic() - began

    patience, other = Patience(0.6, shortest=0.05, longest=0.1), []
    thread = threading.Thread(target=lambda: other.append(tried(patience)))
    with at_most(0), at_most(5):
        thread.start()
        assert tried(patience) < 0.1
    thread.join()
    assert other[0] > 0.4 and tried(patience) > 0.4


def test_a_heartbeat_outlives_an_error_that_nobody_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MAGIC_HEARTBEAT_SECONDS", "0.05")
    caplog.set_level(logging.WARNING, "magic_pipeline.checkpoints")
    store = Store(str(tmp_path))

    def fail(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures")

    with Chain(store, "q", writers="writers").take():
        [name] = store.list("writers")
        with monkeypatch.context() as broken:
            broken.setattr(store, "replace_json", fail)
            time.sleep(0.3)
        before = store.read_json(f"writers/{name}")["beats"]
        time.sleep(0.3)
        assert store.read_json(f"writers/{name}")["beats"] > before
    assert "no sign of life could be given: cannot schedule new futures" in caplog.text


def test_storages_of_one_name_at_two_endpoints_get_a_heartbeat_each(
    moto_s3: S3Server, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """A bucket of the same name on another server is another storage: whoever looks there must find signs of life."""
    url = moto_s3.bucket_url()
    stores = [Store(url, options=moto_s3.options), Store(url, options=moto_s3.behind(proxy.endpoint_url).options)]
    leases = [Chain(store, f"q{number}", writers="writers").take() for number, store in enumerate(stores)]
    assert len(stores[0].list("writers")) == 2
    for lease in leases:
        lease.release()
    assert stores[0].list("writers") == []


def test_an_interrupt_while_a_lease_is_taken_leaves_it_free_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What killed writers left is looked for once the lease is taken, and on a network that takes its time."""
    store = Store(str(tmp_path))
    chain = Chain(store, "q", writers="writers")

    def interrupted(folder: str) -> list[str]:
        raise Preempted

    with monkeypatch.context() as broken:
        broken.setattr(store.sink, "unfinished", interrupted)
        with pytest.raises(Preempted):
            chain.take()
    assert store.exists(chain.released_path(1)) and store.list("writers") == []
