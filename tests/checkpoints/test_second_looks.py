"""What one failed look must not lead to: a removal, a verdict, a take-over."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from magic_pipeline.checkpoints import Chain, Holder, Store, holder, is_gone
from magic_pipeline.checkpoints.fsspec_sink import FsspecSink
from magic_pipeline.errors import StorageError
from tests.checkpoints import breakage
from tests.checkpoints.contract import FACTS, same_bits, state

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def test_a_sweep_removes_no_blob_whose_manifest_it_could_not_read(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit that flipped on the way from the storage is there no more at the next look; a blob that was removed is not either."""
    chain = Chain(store, "q")
    lease = chain.take()
    for step in (4, 3):
        sealed = lease.seal(step, {"rank0": state(step)}, FACTS)
    whole = breakage.raw_bytes(store, sealed.path)
    breakage.flip_a_bit(store, sealed.path)
    with caplog.at_level(logging.WARNING):
        lease.sweep()
    assert f"{sealed.path}: blobs of its epoch stay" in caplog.text
    breakage.overwrite(store, sealed.path, whole)
    found = chain.load(3, FACTS)
    assert found and same_bits(found.tensors("rank0"), state(3))
    orphan = store.write_blob(chain.blobs, state(1), prefix=f"e{lease.epoch:08d}-")
    lease.sweep()
    assert orphan.name not in store.list(chain.blobs) and len(store.list(chain.blobs)) == 2


@pytest.mark.parametrize("what", ["blobs", "manifests", "epochs"])
def test_an_audit_does_not_call_damaged_what_could_not_be_read(
    store: Store, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(store, "q")
    chain.take().seal(4, {"rank0": state(4)}, FACTS)
    fetch = store.sink.fetch

    def refused(path: str) -> Any:
        if f"/{what}/" in path:
            raise StorageError(f"{path}: could not be opened: Permission denied")
        return fetch(path)

    monkeypatch.setattr(store.sink, "fetch", refused)
    with pytest.raises(StorageError, match=rf"q/{what}/.*Permission denied"):
        chain.audit()


AS_NOBODY = """
import os, sys
from magic_pipeline.checkpoints import Store
store = Store(sys.argv[1])
os.setuid(65534)
try:
    print(sorted(found.path for found in store.tree("shut")))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, require_or_skip: Callable[[str], NoReturn]
) -> None:
    if os.getuid() != 0:
        require_or_skip("only root can work as somebody else")
    store = Store(str(tmp_path / "store"))
    store.create_json("open/a.json", {})
    store.create_json("shut/b.json", {})
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "store" / "shut").chmod(0o700)
    command = [sys.executable, "-c", AS_NOBODY, store.url]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told == f"StorageError {store.url}/shut: could not be listed: Permission denied\n"


def test_a_folder_that_goes_with_its_last_object_fails_no_deletion(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_json("q/a.json", {})
    unlink = os.unlink

    def unlink_and_clean_up(path: Any) -> None:
        unlink(path)
        os.rmdir(os.path.dirname(path))  # as somebody with a broom does between two steps of ours

    monkeypatch.setattr(os, "unlink", unlink_and_clean_up)
    store.delete("q/a.json")
    assert store.list("q") == []


class Vague(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Every second write fails, for no reason that has to do with what is there."""

    calls = 0

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        Vague.calls += 1
        if Vague.calls % 2 == 0:
            raise OSError(5, "Input/output error")
        super().put_file(*args, **kwargs)


def test_a_write_that_merely_failed_is_no_proof_of_exclusive_creation(tmp_path: Path) -> None:
    fsspec.register_implementation("vague", Vague, clobber=True)
    assert not FsspecSink(Vague(skip_instance_cache=True), str(tmp_path)).creates_exclusively()


# What a process of somebody else's tells: how it sees the process whose holder it is given.
LOOKS = """
import json, os, sys
from magic_pipeline.checkpoints import Holder, is_gone
Holder.this_process()  # imports what it needs while it may
os.setgid(65534)
os.setuid(65534)
print(is_gone(Holder.from_json(json.loads(sys.argv[1]))))
"""


@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_process_that_may_not_be_looked_at_is_not_taken_for_gone(
    hidepid: int, require_or_skip: Callable[[str], NoReturn]
) -> None:
    """/proc with hidepid, as clusters have it, shows nobody else's processes."""
    if os.getuid() != 0:
        require_or_skip("only root can mount /proc")
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"', "sh"]
    if subprocess.run([*hidden, "true"], check=False, capture_output=True).returncode:
        require_or_skip("/proc cannot be mounted here")
    me = Holder.this_process().as_json()
    for looked_at, gone in ((me, "None\n"), (me | {"pid": 2**22 + 1}, "True\n")):
        command = [*hidden, sys.executable, "-c", LOOKS, json.dumps(looked_at)]
        told = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        assert (told.stderr, told.stdout) == ("", gone)


def test_containers_of_one_image_on_two_machines_are_not_one_machine_that_was_rebooted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holder, "_pid_namespace", lambda: "pid:[4026532999]")
    monkeypatch.setattr(holder, "_machine", lambda: "baked into the image")
    here = Holder.this_process()
    monkeypatch.setattr(holder, "_boot_id", lambda: "of the other machine")
    assert is_gone(here) is None
    monkeypatch.setattr(holder, "_pid_namespace", lambda: "pid:[4026531836]")
    outside = Holder.this_process()
    monkeypatch.setattr(holder, "_boot_id", lambda: "of the next boot")
    assert is_gone(outside) is True
