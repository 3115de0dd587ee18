"""The contract on local disk, and what only a file system can do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from magic_pipeline.checkpoints import Chain, Store
from magic_pipeline.errors import InputError, ObjectExistsError, StorageError
from tests.checkpoints.contract import FACTS, ChainContract, Preempted, StoreContract, state
from tests.checkpoints.sink_contract import SharedSinkContract


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


class TestLocalSink(SharedSinkContract):
    pass


class TestLocalStore(StoreContract):
    pass


class TestLocalChain(ChainContract):
    pass


def test_an_unknown_protocol_is_refused_and_the_supported_ones_are_named() -> None:
    with pytest.raises(InputError, match="'s3x'; supported are a path, file://, s3://, memory://"):
        Store("s3x://user:secret@bucket/x")


@pytest.mark.parametrize("url", ["https://user:secret@host/x", "simplecache::ftp://user:secret@host/x"])
def test_what_keeps_nothing_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InputError, match="nothing that checkpoints can be kept in") as caught:
        Store(url)
    assert "secret" not in str(caught.value)


def test_options_that_nobody_reads_are_refused() -> None:
    with pytest.raises(InputError, match="anon"):
        Store("memory://x", options={"anon": True})


def test_a_file_url_is_the_path(tmp_path: Path) -> None:
    Store(f"file://{tmp_path}").create_json("a.json", {"n": 1})
    assert Store(str(tmp_path)).read_json("a.json") == {"n": 1}


@pytest.mark.parametrize("operation", ["link", "fsync"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_system_call_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, error: BaseException
) -> None:
    chain = Chain(Store(str(tmp_path)), "q")
    lease = chain.take()
    lease.seal(5, {"rank0": state(5)}, FACTS)
    before = sorted(path for path in tmp_path.rglob("*"))

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, operation, failing)
    with pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt):
        lease.seal(4, {"rank0": state(4)}, FACTS)
    monkeypatch.undo()
    assert sorted(path for path in tmp_path.rglob("*")) == before
    lease.seal(4, {"rank0": state(4)}, FACTS)


def test_a_full_disk_is_named_with_path_and_bytes() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    from magic_pipeline.checkpoints.failures import surfaced

    with open(full, "wb", buffering=0) as stream:
        try:
            torch.save(torch.zeros(100_000), stream)
        except (OSError, RuntimeError) as error:
            reason = surfaced(error, None, "store/blobs/x.pt", 0, 400_000)
    assert isinstance(reason, StorageError)
    assert str(reason).startswith("store/blobs/x.pt: no space left after 0 bytes of about 400000")


def test_a_file_system_without_hard_links_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refusing)
    with pytest.raises(StorageError, match="has no hard links"):
        Store(str(tmp_path)).create_json("a.json", {})
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_was_lost_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def linking(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", linking)
    Store(str(tmp_path)).create_json("a.json", {"n": 1})
    assert Store(str(tmp_path)).read_json("a.json") == {"n": 1}


def test_a_folder_in_the_place_of_a_manifest_is_not_a_crash(tmp_path: Path) -> None:
    chain = Chain(Store(str(tmp_path)), "q")
    lease = chain.take()
    lease.seal(5, {"rank0": state(5)}, FACTS)
    (tmp_path / "q/manifests/00000004.e00000001.json").mkdir()
    found = chain.newest(FACTS, order="lowest")
    assert found and found.step == 5
    assert lease.seal(4, {"rank0": state(4)}, FACTS).epoch == 2


def test_the_loser_of_a_race_is_told_so_when_the_winner_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner, loser, sync = Store(str(tmp_path)), Store(str(tmp_path)), os.fsync
    loser.create_json("epochs/1.json", {})

    def losing(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        sync(descriptor)
        winner.create_json("epochs/2.json", {"by": "winner"})
        winner.sink.discard_unfinished("epochs", "2.json")

    monkeypatch.setattr(os, "fsync", losing)
    with pytest.raises(ObjectExistsError):
        loser.create_json("epochs/2.json", {"by": "loser"})
    assert winner.read_json("epochs/2.json") == {"by": "winner"} and winner.sink.unfinished("epochs") == []


def test_nothing_is_written_for_a_name_that_is_taken(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.create_json("a.json", {})
    with pytest.raises(ObjectExistsError):
        store.sink.publish("a.json", lambda _: pytest.fail("bytes were sent for nothing"), exclusive=True)


def test_a_lane_is_stored_without_a_copy() -> None:
    from magic_pipeline.checkpoints.tensor_files import storable

    lanes = torch.randn(4, 3, 5)
    (stored,) = storable({"lane": lanes[2]}).values()
    assert stored.data_ptr() == lanes[2].data_ptr() and stored.untyped_storage().nbytes() == lanes[2].nbytes
    assert stored.equal(lanes[2])


def test_unfinished_publications_go_with_the_next_lease_or_a_sweep_but_never_those_of_a_later_epoch(
    tmp_path: Path,
) -> None:
    chain = Chain(Store(str(tmp_path)), "q")
    blobs = tmp_path / chain.blobs
    blobs.mkdir(parents=True)
    first, second, third = (f".e0000000{epoch}-ab.pt.0123456789abcdef.partial" for epoch in (1, 2, 3))
    for name in (first, second, third):
        (blobs / name).write_bytes(b"half")
    chain.take()
    assert sorted(path.name for path in blobs.iterdir()) == [second, third]
    lease = chain.take()
    (blobs / second).write_bytes(b"half again")
    lease.sweep()
    assert [path.name for path in blobs.iterdir()] == [third] and chain.store.list(chain.blobs) == []
    assert [(finding.object, finding.kind) for finding in chain.audit()] == [("q/blobs/e00000003-ab.pt", "orphaned")]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_a_disk_that_turns_read_only_during_a_save_is_told_and_hides_no_interrupt(
    store: Store, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As ext4 does after an error: then not even the temporary file can be removed."""
    store.create_json("a.json", {})

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    def interrupted(stream: BinaryIO) -> None:
        raise Preempted

    with monkeypatch.context() as broken:
        for name in ("link", "unlink"):
            broken.setattr(os, name, refused)
        with pytest.raises(StorageError, match=rf"b.json: could not be written .*{os.strerror(code)}"):
            store.create_json("b.json", {})
        with pytest.raises(Preempted):
            store.sink.publish("c.json", interrupted, exclusive=True)
    assert caplog.text.count("stays until gc") == 2
    assert store.sink.list("") == ["a.json"] and store.sink.unfinished("") == ["b.json", "c.json"]
