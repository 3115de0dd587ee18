"""The contract on what else fsspec knows: its own local file system, which promises little, and S3 without S3's own sink."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from magic_pipeline.checkpoints import Chain, Store
from magic_pipeline.checkpoints.fsspec_sink import FsspecSink
from magic_pipeline.errors import InputError, StorageError
from tests.checkpoints.contract import FACTS, ChainContract, StoreContract, same_bits, state
from tests.checkpoints.sink_contract import SinkContract
from tests.servers.s3_server import S3Server


class Plain(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Local files under a protocol of their own, so that they get no sink of their own either."""

    protocol = ("plain",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("plain://")))


@pytest.fixture(autouse=True)
def plain_is_known() -> None:
    fsspec.register_implementation("plain", Plain, clobber=True)


class OnPlainFiles:
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"plain://{tmp_path}/store"


class OnS3:
    @pytest.fixture
    def url(self, moto_s3: S3Server) -> str:
        return moto_s3.bucket_url()

    @pytest.fixture
    def open_store(self, moto_s3: S3Server, url: str) -> Callable[[], Store]:
        def opened() -> Store:
            store = Store("memory://nothing")
            files = fsspec.filesystem(
                "s3",
                endpoint_url=moto_s3.endpoint_url,
                key=moto_s3.key,
                secret=moto_s3.secret,
                use_listings_cache=False,
            )
            store.sink = FsspecSink(files, url)
            return store

        return opened


class TestPlainSink(OnPlainFiles, SinkContract):
    exclusive = False
    atomic = False
    keeps_unfinished = False


class TestPlainStore(OnPlainFiles, StoreContract):
    pass


class TestPlainChain(OnPlainFiles, ChainContract):
    pass


class TestS3AsAnySink(OnS3, SinkContract):
    slow = True
    keeps_unfinished = False
    many = 20


class TestS3AsAnyStore(OnS3, StoreContract):
    slow = True


def test_a_backend_that_cannot_create_exclusively_is_said_loudly_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(f"plain://{tmp_path}/store")
    with caplog.at_level(logging.WARNING, "magic_pipeline.checkpoints"):
        for folder in ("one", "two"):
            Chain(store, folder, writers="writers").take().release()
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"plain://{tmp_path}/store CANNOT CREATE OBJECTS EXCLUSIVELY")


def test_a_connection_that_is_lost_for_a_while_is_outlasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(Store(f"plain://{tmp_path}/store"), "q")
    calls: list[str] = []
    for name in ("put_file", "get_file", "ls", "info"):
        monkeypatch.setattr(Plain, name, lost_every_third_time(getattr(Plain, name), calls))
    monkeypatch.setattr("magic_pipeline.checkpoints.patience.random.uniform", lambda *_: 0.001)
    lease = chain.take()
    for step in (5, 4):
        lease.seal(step, {"rank0": state(step)}, FACTS)
    found = chain.newest(FACTS, order="lowest")
    assert found and found.step == 4 and same_bits(found.tensors("rank0"), state(4))
    assert len(calls) > 20


def lost_every_third_time(call: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def calling(*args: Any, **kwargs: Any) -> Any:
        calls.append(call.__name__)
        if len(calls) % 3 == 0:
            raise ConnectionResetError(104, "Connection reset by peer")
        return call(*args, **kwargs)

    return calling


def test_patience_ends_with_the_object_and_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise TimeoutError

    monkeypatch.setenv("MAGIC_STORAGE_PATIENCE_SECONDS", "0.5")
    monkeypatch.setattr(Plain, "put_file", lost)
    with pytest.raises(StorageError, match=r"store/a.json: TimeoutError; given up after \d s of trying"):
        Store(f"plain://{tmp_path}/store").create_json("a.json", {})


@pytest.mark.parametrize("url", ["nosuch://x/y", "http://host/x", "simplecache::plain://x", "plain::zip://x"])
def test_what_is_no_storage_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"storage: "):
        Store(url)


def test_a_package_that_is_missing_is_named() -> None:
    if importlib.util.find_spec("gcsfs") is not None:
        pytest.skip("gcsfs is installed")
    with pytest.raises(InputError, match=r"gs:// needs a package that is not installed: .*gcsfs"):
        Store("gs://bucket/x")


def test_a_login_in_the_url_is_never_shown(tmp_path: Path) -> None:
    store = Store(f"plain://somebody:hunter2@{tmp_path}")
    assert "hunter2" not in store.url and "hunter2" not in repr(store) + repr(store.sink)
