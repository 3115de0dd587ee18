"""What is tried again because it passes, and what is told at once because no waiting mends it."""

from __future__ import annotations

import functools
import http.server
import logging
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from magic_pipeline.checkpoints import Chain, Store
from magic_pipeline.errors import CredentialsError, InputError, StorageError, StorageFullError
from tests.checkpoints.contract import FACTS, same_bits, state
from tests.checkpoints.sink_contract import content, publish, read
from tests.servers.faulty import Answer, FaultyProxy, faulty
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.usefixtures("connect_once")


@pytest.fixture
def proxy(moto_s3: S3Server) -> Iterator[FaultyProxy]:
    with faulty(moto_s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def store(moto_s3: S3Server, proxy: FaultyProxy) -> Store:
    return Store(moto_s3.bucket_url(), options=moto_s3.behind(proxy.endpoint_url).options)


def test_bytes_that_arrived_damaged_or_in_part_are_sent_again(
    store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magic_pipeline.checkpoints.patience.random.uniform", lambda *_: 0.01)
    codes = ["BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"]
    rules = [proxy.strike(Answer(400, code), method="PUT", path="a.json") for code in codes]
    rules.append(proxy.strike(Answer(400, "BadDigest"), method="PUT", path="partNumber=2"))
    written = content()
    store.create_json("a.json", {"n": 1})
    publish(store.sink, "large", written, exclusive=True)
    assert store.read_json("a.json") == {"n": 1} and read(store.sink, "large") == written
    assert [rule.struck for rule in rules] == [1] * 5


def test_a_quota_of_minio_is_told_as_one(store: Store, proxy: FaultyProxy) -> None:
    proxy.strike(Answer(400, "XMinioAdminBucketQuotaExceeded", "Bucket quota exceeded"), method="PUT", times=None)
    with pytest.raises(StorageFullError, match=r"a.json: no space left"):
        store.create_json("a.json", {})


def test_a_server_that_knows_no_conditions_is_written_to_all_the_same(
    store: Store, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Also before anybody took a lease, which is when it is said loudly."""
    knows_none = Answer(501, "NotImplemented", "A header you provided implies functionality that is not implemented")
    rule = proxy.strike(knows_none, login="if-none-match", times=None)
    written = content()
    publish(store.sink, "large", written, exclusive=True)
    store.create_json("a.json", {"n": 1})
    assert read(store.sink, "large") == written and store.read_json("a.json") == {"n": 1} and rule.struck == 1
    with caplog.at_level(logging.WARNING), Chain(store, "q", writers="writers").take() as lease:
        lease.seal(4, {"rank0": state(4)}, FACTS)
    assert "CANNOT CREATE OBJECTS EXCLUSIVELY" in caplog.text
    found = lease.chain.newest(FACTS, order="lowest")
    assert found and same_bits(found.tensors("rank0"), state(4))


def test_a_wrong_clock_is_called_so(store: Store, proxy: FaultyProxy) -> None:
    proxy.strike(Answer(403, "RequestTimeTooSkewed"), times=None)
    with pytest.raises(CredentialsError, match=r"a.json: access is refused: .*this machine's clock or the server's"):
        store.create_json("a.json", {})


class Untrusted(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A handshake that the client breaks off is what this is for."""


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[str]:
    """A server with a certificate that nobody has signed."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run(
        [*command, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Untrusted(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_certificate_that_is_not_trusted_is_told_at_once(moto_s3: S3Server, untrusted: str) -> None:
    began = time.monotonic()
    with pytest.raises(
        StorageError, match=r"a.json: SSLError \(put_object\): the server's certificate is not trusted: self"
    ):
        Store(moto_s3.bucket_url(), options=moto_s3.behind(untrusted).options).create_json("a.json", {})
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("127.0.0.1:9000", "expected http://host:port or https://host:port, found '127.0.0.1:9000'"),
        ("s3://host", "expected http://host:port"),
        ("http://somebody:hunter2@127.0.0.1:9000", "found a login in it"),
        ("somebody:hunter2@127.0.0.1:9000", "found a login in it"),
    ],
)
def test_an_endpoint_that_is_none_is_refused_before_anything_waits_for_it(
    endpoint: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=rf"storage_options.endpoint_url: {problem}") as given:
        Store("s3://bucket/x", options={"endpoint_url": endpoint})
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(InputError, match=rf"AWS_ENDPOINT_URL: {problem}") as found:
        Store("s3://bucket/x")
    assert "hunter2" not in f"{given.value} {found.value}"
    Store("s3://bucket/x", options={"endpoint_url": "http://127.0.0.1:9000/"})


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    take = functools.partial(Chain(Store(str(tmp_path)), "q", writers="writers").take)
    for name in ("MAGIC_HEARTBEAT_SECONDS", "MAGIC_EXPIRY_SECONDS"):
        monkeypatch.setenv(name, text)
        with pytest.raises(InputError, match=rf"{name}: expected a number of seconds, found '{text}'"):
            take()
        monkeypatch.delenv(name)
    monkeypatch.setenv("MAGIC_STORAGE_PATIENCE_SECONDS", text)
    with pytest.raises(InputError, match=r"MAGIC_STORAGE_PATIENCE_SECONDS: expected a number of seconds"):
        Store("s3://bucket/x")


@pytest.mark.parametrize(("heartbeat", "expiry"), [("30", "45"), ("0", "120"), ("90", "")])
def test_times_by_which_the_living_would_be_overtaken_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heartbeat: str, expiry: str
) -> None:
    monkeypatch.setenv("MAGIC_HEARTBEAT_SECONDS", heartbeat)
    monkeypatch.setenv("MAGIC_EXPIRY_SECONDS", expiry)
    with pytest.raises(InputError, match=r"MAGIC_EXPIRY_SECONDS: expected at least twice MAGIC_HEARTBEAT_SECONDS"):
        Chain(Store(str(tmp_path)), "q", writers="writers").take()


@pytest.mark.parametrize("url", ["s3://bucket//x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/a/./b"])
def test_a_prefix_that_servers_read_in_two_ways_is_refused(url: str) -> None:
    """SeaweedFS writes a//b where it does not list it, and takes .. for an invalid request."""
    with pytest.raises(InputError, match=r"storage: expected a prefix without empty parts"):
        Store(url)
    assert Store("s3://bucket/").url == "s3://bucket" and Store("s3://bucket/a b/").url == "s3://bucket/a b"
