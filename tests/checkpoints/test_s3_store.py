"""The contract on S3: moto's server and SeaweedFS, and what only S3 can do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import s3fs

from magic_pipeline.checkpoints import Chain, Store
from magic_pipeline.errors import InputError
from tests.checkpoints.contract import FACTS, ChainContract, StoreContract, state
from tests.checkpoints.other_process import other_process
from tests.checkpoints.sink_contract import MIB, SharedSinkContract, content, publish
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.usefixtures("connect_once")


@pytest.fixture
def url(server: S3Server) -> str:
    return server.bucket_url()


@pytest.fixture
def options(server: S3Server) -> dict[str, Any]:
    return server.options


@pytest.fixture
def server(seaweedfs: S3Server) -> S3Server:
    """For the tests below the contract; the classes have one each."""
    return seaweedfs


class OnMoto:
    @pytest.fixture
    def server(self, moto_s3: S3Server) -> S3Server:
        return moto_s3


class OnSeaweedFS:
    @pytest.fixture
    def server(self, seaweedfs: S3Server) -> S3Server:
        return seaweedfs


class TestMotoSink(OnMoto, SharedSinkContract):
    slow = True
    dates_unfinished = False  # moto says 2010
    many = 20  # the real server lists the many


class TestMotoStore(OnMoto, StoreContract):
    slow = True


class TestMotoChain(OnMoto, ChainContract):
    slow = True


class TestSeaweedFSSink(OnSeaweedFS, SharedSinkContract):
    slow = True
    races = 2  # it ponders each for two seconds


class TestSeaweedFSStore(OnSeaweedFS, StoreContract):
    slow = True


class TestSeaweedFSChain(OnSeaweedFS, ChainContract):
    slow = True


def test_a_listing_that_another_library_keeps_misleads_nobody(
    server: S3Server, url: str, options: dict[str, Any], store: Store
) -> None:
    """s3fs as it comes keeps listings, in this process for all that ask the same way, and in others."""
    theirs = s3fs.S3FileSystem(
        endpoint_url=server.endpoint_url,
        key=server.key,
        secret=server.secret,
        client_kwargs={"region_name": "us-east-1"},
    )
    chain = Chain(store, "q")
    assert chain.sealed() == [] and not theirs.exists(f"{url}/q/manifests")
    lease = chain.take()
    lease.seal(3, {"rank0": state(3)}, FACTS)
    assert len(theirs.ls(f"{url}/q/manifests")) == 1
    with other_process("list_folder", url, options) as other:
        lease.seal(2, {"rank0": state(2)}, FACTS)
        assert len(theirs.ls(f"{url}/q/manifests")) == 1, "s3fs keeps no listings any more: this test shows nothing"
        other.tell({"folder": "q/manifests"})
        assert other.hear() == ["00000002.e00000001.json", "00000003.e00000001.json"]
    assert [name.step for name in chain.sealed()] == [2, 3]
    theirs.rm(f"{url}/q/manifests/00000002.e00000001.json")
    found = chain.newest(FACTS, order="lowest")
    assert found and found.step == 3


def test_the_same_storage_with_options_from_the_environment(
    server: S3Server, url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_json("a.json", {"n": 1})
    monkeypatch.undo()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    assert Store(url).read_json("a.json") == {"n": 1}


def test_a_profile_gives_key_and_endpoint(
    server: S3Server, url: str, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.create_json("a.json", {"n": 1})
    monkeypatch.undo()
    (tmp_path / "config").write_text(f"[profile lab]\nregion = eu-west-3\nendpoint_url = {server.endpoint_url}\n")
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {server.key}\naws_secret_access_key = {server.secret}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert Store(url, options={"profile": "lab"}).read_json("a.json") == {"n": 1}


@pytest.mark.parametrize("size", [8 * MIB - 1, 8 * MIB, 8 * MIB + 1])
def test_an_object_is_one_put_or_an_upload_in_parts_and_known_by_its_token(
    server: S3Server, store: Store, url: str, size: int
) -> None:
    publish(store.sink, "object", content(size), exclusive=True)
    head = server.client().head_object(Bucket="magic", Key=f"{url.rpartition('/')[2]}/object")
    assert len(head["Metadata"]["magic-publication"]) == 32
    assert head["ETag"].strip('"').partition("-")[2] == {8 * MIB + 1: "2", 8 * MIB: "1"}.get(size, "")
    assert server.keys(url) == ["object"] and server.uploads(url) == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://", "no location"),
        ("s3:///x", "expected s3://bucket/prefix"),
        ("s3://bucket/a*b", "expected s3://bucket/prefix"),
        ("s3://AKIA:hunter2@bucket/x", "found a login"),
        ("s3://AKIA:hunt/hunter2@bucket/x", "found a login"),
    ],
)
def test_a_location_that_is_none_is_refused_and_no_secret_shown(url: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        Store(url)
    assert "hunter2" not in str(caught.value)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(
        InputError, match=r"storage_options: S3 has no option endpoint; known are .*endpoint_url"
    ) as caught:
        Store("s3://bucket/x", options={"endpoint": "http://hunter2"})
    assert "hunter2" not in str(caught.value)


FORK = """
import os, sys
from magic_pipeline.checkpoints import Store
store = Store(sys.argv[1])
store.create_json("a.json", {"n": 1})
child = os.fork()
if child == 0:
    store.create_json("b.json", store.read_json("a.json"))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store.create_json("c.json", store.read_json("b.json"))
"""


def test_a_fork_makes_a_connection_of_its_own_and_leaves_its_parents_alone(
    server: S3Server, store: Store, url: str
) -> None:
    command = [sys.executable, "-c", FORK, url]
    subprocess.run(command, env={**os.environ, **server.environment}, check=True, timeout=60)
    assert store.sink.list("") == ["a.json", "b.json", "c.json"] and store.read_json("c.json") == {"n": 1}
