"""S3 that is away, slow, lying, full or shut: what is outlasted, what is told, and how soon.

All of it happens in a proxy before a real server; the code under test and its client are as they come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from magic_pipeline.checkpoints import Chain, Store, s3_sink
from magic_pipeline.checkpoints.patience import patience_seconds
from magic_pipeline.errors import (
    CredentialsError,
    DamagedObjectError,
    InputError,
    MagicError,
    ObjectExistsError,
    StorageError,
    StorageFullError,
)
from tests.checkpoints.contract import FACTS, same_bits, state
from tests.checkpoints.sink_contract import LARGE, MIB, content, publish, read
from tests.servers.faulty import (
    DENIED,
    ERROR_AFTER_200,
    EXPIRED,
    INTERNAL_ERROR,
    QUOTA,
    SLOW_DOWN,
    Answer,
    Break,
    Delay,
    Fault,
    FaultyProxy,
    Outage,
    faulty,
)
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.usefixtures("connect_once")

CONFLICT = Answer(409, "ConditionalRequestConflict", "The conditional request cannot succeed.")
TOKEN = "FwoGZXIvYXdzEXAMPLETOKEN"
HANGS = Delay(1.5)  # longer than the time-out below


@pytest.fixture(scope="module")
def moto_proxy(moto_s3: S3Server) -> Iterator[FaultyProxy]:
    with faulty(moto_s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def seaweedfs_proxy(seaweedfs: S3Server) -> Iterator[FaultyProxy]:
    with faulty(seaweedfs.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def server(moto_s3: S3Server) -> S3Server:
    return moto_s3


@pytest.fixture
def proxy(moto_proxy: FaultyProxy) -> Iterator[FaultyProxy]:
    yield moto_proxy
    moto_proxy.heal()
    moto_proxy.exchanges.clear()


@pytest.fixture
def url(server: S3Server) -> str:
    return server.bucket_url()


@pytest.fixture
def options(server: S3Server, proxy: FaultyProxy) -> dict[str, Any]:
    quick = {"config_kwargs": {"connect_timeout": 1, "read_timeout": 1}}
    return {**server.behind(proxy.endpoint_url).options, "token": TOKEN, **quick}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again soon: for tests of what is repeated, not of when."""
    monkeypatch.setattr("magic_pipeline.checkpoints.patience.random.uniform", lambda *_: 0.01)


@pytest.fixture(autouse=True)
def no_secret_is_told(server: S3Server, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a test makes happen, no log record holds what must stay secret."""
    caplog.set_level(logging.DEBUG, "magic_pipeline")
    yield
    said = "\n".join([caplog.text, *(repr(vars(record)) for record in caplog.records)])
    assert not any(secret in said for secret in (server.key, server.secret, TOKEN))


def told(error: BaseException, server: S3Server) -> str:
    """The error's message, once nothing secret is in it, in what it is made of, or in its whole traceback."""
    everything = "\n".join([*traceback.format_exception(error), repr(error), repr(vars(error)), str(error)])
    assert not any(secret in everything for secret in (server.key, server.secret, TOKEN))
    assert "\n" not in str(error)
    return str(error)


def large_state(step: int) -> dict[str, torch.Tensor]:
    """Three parts of an upload."""
    return {**state(step), "params/large": torch.arange(LARGE // 4, dtype=torch.int32) + step}


def write_three_parts(stream: BinaryIO) -> None:
    stream.write(bytes(LARGE))


# What is outlasted


FLEETING: dict[str, tuple[Fault, ...]] = {
    "refusals": (SLOW_DOWN, INTERNAL_ERROR, CONFLICT),
    "lost requests": (Break.LOSE_REQUEST,),
    "lost answers": (Break.LOSE_ANSWER,),
    "answers that break off": (Break.BREAK_OFF,),
}


def a_whole_life(store: Store) -> None:
    """Everything that a chain can do, over and over, with large and small objects; what is left is checked."""
    chain = Chain(store, "q")
    lease = chain.take()
    for step in (4, 3, 2):
        lease.seal(step, {"rank0": large_state(step) if step == 3 else state(step)}, FACTS)
        lease.retire(order="lowest")
    found = chain.load(3, FACTS, read=["rank0"])
    assert found and same_bits(found.tensors("rank0"), large_state(3))
    assert [name.step for name in chain.sealed()] == [2, 3]
    lease.complete({"scores": state(0)}, FACTS)
    lease.clear()
    lease.release()
    completed = chain.completed(FACTS)
    assert (
        completed and same_bits(completed.tensors("scores"), state(0)) and chain.sealed() == [] and chain.audit() == []
    )
    # An upload whose beginning was never answered is nobody's; a later lease frees it.
    chain.take().sweep()
    assert list(store.sink.unfinished_tree("")) == []
    names = {found.path for found in store.tree("q")}
    assert {name.partition("/")[2].partition("/")[0] for name in names} == {
        "complete.e00000001.json",
        "blobs",
        "epochs",
    }
    assert store.list("q/blobs") == [completed.blobs["scores"].name]


@pytest.mark.parametrize("faults", FLEETING.values(), ids=FLEETING)
def test_a_life_in_which_every_fourth_request_fails_ends_well(
    store: Store, proxy: FaultyProxy, server: S3Server, url: str, faults: tuple[Fault, ...], impatient: None
) -> None:
    rules = [proxy.strike(fault, every=4 * len(faults), times=None) for fault in faults]
    a_whole_life(store)
    assert all(rule.struck > 4 for rule in rules) and sum(rule.struck for rule in rules) > 15
    assert server.uploads(url) == []


@pytest.mark.parametrize("fault", [Break.LOSE_ANSWER, Break.LOSE_REQUEST], ids=["lost answer", "lost request"])
def test_a_life_on_a_real_server_whose_every_third_answer_is_lost_ends_well(
    seaweedfs: S3Server, seaweedfs_proxy: FaultyProxy, fault: Fault, impatient: None
) -> None:
    url = seaweedfs.bucket_url()
    rule = seaweedfs_proxy.strike(fault, every=3, times=None)
    try:
        a_whole_life(Store(url, options=seaweedfs.behind(seaweedfs_proxy.endpoint_url).options))
    finally:
        seaweedfs_proxy.heal()
    assert rule.struck > 20 and seaweedfs.uploads(url) == []


def test_answers_that_do_not_come_in_time_are_outlasted(store: Store, proxy: FaultyProxy, impatient: None) -> None:
    rules = [proxy.strike(HANGS, method=method) for method in ("PUT", "POST", "GET", "HEAD")]
    blob = store.write_blob("blobs", large_state(1))
    assert same_bits(store.read_blob("blobs", blob), large_state(1)) and store.size(f"blobs/{blob.name}") == blob.size
    assert [rule.struck for rule in rules] == [1, 1, 1, 1]


def test_a_server_that_is_down_for_five_seconds_in_the_middle_of_a_save_is_outlasted(
    store: Store, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magic_pipeline.checkpoints.patience.random.uniform", lambda _, longest: min(longest, 1))
    lease = Chain(store, "q").take()
    began = time.monotonic()
    proxy.strike(Outage(5), method="PUT", path="partNumber=2")
    lease.seal(4, {"rank0": large_state(4)}, FACTS)
    assert 5 < time.monotonic() - began < 15
    found = lease.chain.newest(FACTS, order="lowest")
    assert found and same_bits(found.tensors("rank0"), large_state(4))
    assert any(
        "trying again in" in record.getMessage() and "q/blobs/" in record.getMessage() for record in caplog.records
    )


def test_a_server_that_is_down_for_five_seconds_in_the_middle_of_a_load_is_outlasted(
    store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magic_pipeline.checkpoints.patience.random.uniform", lambda _, longest: min(longest, 1))
    Chain(store, "q").take().seal(4, {"rank0": large_state(4)}, FACTS)
    began = time.monotonic()
    proxy.strike(Outage(5), method="GET", path="/blobs/", after=1)
    found = Chain(store, "q").newest(FACTS, order="lowest", read=["rank0"])
    assert found and same_bits(found.tensors("rank0"), large_state(4))
    assert 5 < time.monotonic() - began < 15


def test_a_server_that_is_down_from_the_start_is_outlasted(store: Store, proxy: FaultyProxy) -> None:
    proxy.down_for(1)
    store.create_json("a.json", {"n": 1})
    assert store.read_json("a.json") == {"n": 1}


def test_a_throttling_server_is_not_hammered(store: Store, proxy: FaultyProxy) -> None:
    rule = proxy.strike(SLOW_DOWN, times=None)
    threading.Timer(3, proxy.heal).start()
    store.create_json("a.json", {"n": 1})
    assert 3 <= rule.struck <= 8


# Whose object it is


def test_an_object_whose_answer_was_lost_is_ours(store: Store, proxy: FaultyProxy, impatient: None) -> None:
    rules = [proxy.strike(Break.LOSE_ANSWER, method="PUT", path="manifest")]
    store.create_json("manifest.json", {"by": "me"})
    assert store.read_json("manifest.json") == {"by": "me"}
    rules.append(proxy.strike(Break.LOSE_ANSWER, method="POST", path="large.*uploadId="))
    written = content()
    publish(store.sink, "large", written, exclusive=True)
    assert read(store.sink, "large") == written and [rule.struck for rule in rules] == [1, 1]
    for path in ("manifest.json", "large"):
        with pytest.raises(ObjectExistsError, match=path):
            publish(store.sink, path, b"another", exclusive=True)


def test_an_object_of_another_writer_with_the_same_bytes_is_not_ours(
    store: Store, open_store: Callable[[], Store], proxy: FaultyProxy, impatient: None
) -> None:
    open_store().create_json("manifest.json", {"by": "anybody"})
    proxy.strike(Break.LOSE_ANSWER, method="PUT", path="manifest")
    with pytest.raises(ObjectExistsError, match=r"manifest.json: exists already"):
        store.create_json("manifest.json", {"by": "anybody"})


def test_whose_it_is_can_be_asked_later_when_the_answer_to_that_is_lost_too(
    store: Store, proxy: FaultyProxy, impatient: None
) -> None:
    proxy.strike(Break.LOSE_ANSWER, method="PUT", path="manifest")
    rule = proxy.strike(SLOW_DOWN, method="HEAD", path="manifest", times=3)
    store.create_json("manifest.json", {"by": "me"})
    assert rule.struck == 3


def test_a_completion_that_fails_after_it_was_accepted_is_made_again(
    store: Store, proxy: FaultyProxy, server: S3Server, url: str, impatient: None
) -> None:
    rule = proxy.strike(ERROR_AFTER_200, method="POST", path="uploadId=")
    written = content()
    publish(store.sink, "large", written, exclusive=True)
    assert read(store.sink, "large") == written and rule.struck == 1 and server.uploads(url) == []


# Damage on the way


@pytest.mark.parametrize("fault", [Break.FLIP_A_BIT, Break.SHORTEN], ids=lambda fault: fault.name)
def test_damage_on_the_way_is_read_once_more_and_believed_when_it_comes_again(
    store: Store, proxy: FaultyProxy, fault: Fault, impatient: None
) -> None:
    store.create_json("a.json", {"n": 1})
    small, large = (store.write_blob("blobs", made) for made in (state(1), large_state(1)))
    reads: list[tuple[str, Callable[[], Any]]] = [
        ("a.json", lambda: store.read_json("a.json")),
        (small.name, lambda: store.read_blob("blobs", small)),
        (large.name, lambda: store.read_blob("blobs", large)),
        (large.name, lambda: store.verify_blob("blobs", large)),
    ]
    for number, (path, once) in enumerate(reads):
        # Of a large object the second part. When the first is short, the rest is asked for.
        rule = proxy.strike(fault, method="GET", path=path, after=int(number > 1))
        once()
        assert rule.struck == 1
        if fault is Break.FLIP_A_BIT:
            lasting = proxy.strike(fault, method="GET", path=path, times=None)
            with pytest.raises(DamagedObjectError, match=path):
                once()
            assert lasting.struck >= 2
            proxy.heal()


def test_a_download_that_breaks_off_is_read_again_without_a_word_of_damage(
    store: Store, proxy: FaultyProxy, impatient: None
) -> None:
    blob = store.write_blob("blobs", large_state(1))
    rule = proxy.strike(Break.BREAK_OFF, method="GET", path=blob.name, every=2, times=3)
    assert same_bits(store.read_blob("blobs", blob), large_state(1)) and rule.struck >= 2


# What is told at once


def asked(proxy: FaultyProxy, work: Callable[[], Any]) -> int:
    """Requests that the work made, whether or not it failed."""
    before = len(proxy.exchanges)
    with contextlib.suppress(MagicError):
        work()
    return len(proxy.exchanges) - before


@pytest.mark.parametrize(
    ("method", "action", "work"),
    [
        ("PUT", "put_object", lambda store: store.create_json("a/b.json", {})),
        ("GET", "get_object", lambda store: store.read_json("a/b.json")),
        ("HEAD", "head_object", lambda store: store.exists("a/b.json")),
        ("DELETE", "delete_object", lambda store: store.delete("a/b.json")),
        ("GET", "list_objects_v2", lambda store: store.list("a/b.json")),
        ("GET", "list_multipart_uploads", lambda store: store.sink.unfinished("a/b.json")),
    ],
)
def test_refused_access_is_told_at_once_with_object_and_action(
    store: Store, proxy: FaultyProxy, server: S3Server, method: str, action: str, work: Callable[[Store], Any]
) -> None:
    rule = proxy.strike(DENIED, method=method, times=None)
    with pytest.raises(CredentialsError) as caught:
        work(store)
    message = told(caught.value, server)
    code = "403" if method == "HEAD" else "AccessDenied"  # HEAD is answered without a body
    assert message == f"{store.url}/a/b.json: access is refused: {code} ({action})" and rule.struck == 1


def test_a_part_that_is_refused_ends_the_upload_and_leaves_nothing(
    store: Store, proxy: FaultyProxy, server: S3Server, url: str
) -> None:
    proxy.strike(DENIED, method="PUT", path="partNumber=2")
    with pytest.raises(CredentialsError, match=r"folder/large: access is refused: AccessDenied \(upload_part\)"):
        store.sink.publish("folder/large", write_three_parts, exclusive=True)
    assert server.keys(url) == server.uploads(url) == []


def test_a_wrong_secret_and_an_unknown_key_are_refused_without_being_told(seaweedfs: S3Server) -> None:
    for options in ({"secret": "x" * 40}, {"key": "AKIAUNKNOWN"}):
        store = Store(seaweedfs.bucket_url(), options={**seaweedfs.options, **options})
        with pytest.raises(CredentialsError, match="a.json: access is refused: ") as caught:
            store.create_json("a.json", {})
        assert not any(secret in told(caught.value, seaweedfs) for secret in options.values())


def test_no_credentials_at_all_are_told_with_what_to_do(
    server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CredentialsError, match="no credentials were found; set AWS_PROFILE"):
        Store(url, options={"endpoint_url": server.endpoint_url}).create_json("a.json", {})
    with pytest.raises(MagicError, match="nosuch") as caught:
        Store(url, options={"endpoint_url": server.endpoint_url, "profile": "nosuch"}).create_json("a.json", {})
    told(caught.value, server)


def test_a_missing_bucket_is_named(server: S3Server, proxy: FaultyProxy) -> None:
    store = Store("s3://no-such-bucket/x", options=server.behind(proxy.endpoint_url).options)
    for work in (
        lambda: store.create_json("a.json", {}),
        lambda: store.read_json("a.json"),
        lambda: store.list("folder"),
        lambda: list(store.sink.unfinished_tree("")),
        lambda: store.sink.publish("large", write_three_parts, exclusive=True),
    ):
        with pytest.raises(InputError, match=r"no bucket 'no-such-bucket'") as caught:
            work()
        told(caught.value, server)
        assert asked(proxy, work) == 1


@pytest.mark.parametrize("fault", [QUOTA, Answer(507, "InsufficientStorage"), Answer(403, "QuotaExceeded")])
def test_a_used_up_quota_is_told_at_once_with_the_object(
    store: Store, proxy: FaultyProxy, server: S3Server, url: str, fault: Answer
) -> None:
    proxy.strike(fault, method="PUT", times=None)
    began = time.monotonic()
    with pytest.raises(StorageFullError, match=r"a.json: no space left: .*free space or raise the quota") as caught:
        store.create_json("a.json", {})
    told(caught.value, server)
    with pytest.raises(StorageFullError, match=r"blobs/.*: no space left"):
        store.write_blob("blobs", large_state(1))
    assert time.monotonic() - began < 5 and server.keys(url) == server.uploads(url) == []


def test_an_unheard_of_answer_is_told_with_its_words(store: Store, proxy: FaultyProxy, server: S3Server) -> None:
    proxy.strike(Answer(400, "Peculiar", "the moon is full"), times=None)
    with pytest.raises(StorageError, match=r"a.json: Peculiar \(put_object\): the moon is full") as caught:
        store.create_json("a.json", {})
    told(caught.value, server)


# Credentials that expire


class Login:
    """A profile whose key can be renewed, as a login tool renews it, in the file that AWS_SHARED_CREDENTIALS_FILE names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.renew("AKIAOLD")

    def renew(self, key: str) -> None:
        login = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s3cr3t-of-{key}\naws_session_token = {TOKEN}\n"
        self.path.write_text(login)


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Login:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return Login(tmp_path / "credentials")


@pytest.fixture
def logged_in(login: Login, url: str, proxy: FaultyProxy) -> Store:
    store = Store(url, options={"endpoint_url": proxy.endpoint_url, "region": "us-east-1"})
    store.create_json("before.json", {})
    return store


def test_expired_credentials_are_read_anew_once(logged_in: Store, login: Login, proxy: FaultyProxy) -> None:
    rule = proxy.strike(EXPIRED, login="AKIAOLD", times=None)
    login.renew("AKIANEW")
    logged_in.create_json("after.json", {"n": 1})
    assert logged_in.read_json("after.json") == {"n": 1} and rule.struck == 1


def test_credentials_that_expire_between_the_parts_of_an_object_are_read_anew(
    logged_in: Store, login: Login, proxy: FaultyProxy
) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(written[: 9 * MIB])
        login.renew("AKIANEW")
        proxy.strike(EXPIRED, login="AKIAOLD", times=None)
        stream.write(written[9 * MIB :])

    written = content()
    logged_in.sink.publish("large", write, exclusive=True)
    login.renew("AKIANEWEST")
    proxy.strike(EXPIRED, login="AKIANEW/", times=None)
    assert read(logged_in.sink, "large") == written


def test_credentials_that_stay_expired_are_called_so(
    logged_in: Store, proxy: FaultyProxy, server: S3Server, url: str
) -> None:
    rule = proxy.strike(EXPIRED, times=None)
    with pytest.raises(
        CredentialsError, match=r"a.json: the credentials have expired: ExpiredToken \(put_object\)"
    ) as caught:
        logged_in.create_json("a.json", {})
    message = told(caught.value, server)
    assert rule.struck == 2 and "renew them" in message
    assert not any(secret in "".join(traceback.format_exception(caught.value)) for secret in ("AKIAOLD", "s3cr3t-of"))
    began = time.monotonic()
    with pytest.raises(CredentialsError, match="expired"):
        logged_in.write_blob("blobs", large_state(1))
    assert time.monotonic() - began < 5


# The end of patience


def test_patience_ends_with_the_object_the_reason_and_the_time_spent(
    url: str, options: dict[str, Any], proxy: FaultyProxy, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGIC_STORAGE_PATIENCE_SECONDS", "1.5")
    store = Store(url, options=options)
    store.create_json("a.json", {})
    with proxy.down():
        for work in (lambda: store.create_json("b.json", {}), lambda: store.read_json("b.json")):
            with pytest.raises(StorageError, match=r"b.json: no answer: .*; given up after [01] s of trying") as caught:
                work()
            assert not isinstance(caught.value, CredentialsError | DamagedObjectError)
            told(caught.value, server)
    proxy.strike(SLOW_DOWN, times=None)
    with pytest.raises(StorageError, match=r"b.json: SlowDown \(put_object\); given up after"):
        store.create_json("b.json", {})


def test_a_server_that_never_answered_is_not_waited_for_as_long_as_one_that_did(
    url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_sink, "_TO_REACH", 1.0)
    store = Store(url, options=options | {"endpoint_url": "http://mistyped.invalid:8333"})
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"a.json: no answer: .*; given up after [01] s of trying"):
        store.create_json("a.json", {})
    assert time.monotonic() - began < 10 < patience_seconds()


def test_a_large_save_that_is_given_up_ends_soon_and_its_upload_is_found_later(
    url: str, options: dict[str, Any], proxy: FaultyProxy, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGIC_STORAGE_PATIENCE_SECONDS", "3")
    store = Store(url, options=options)
    rule = proxy.strike(Outage(8), method="PUT", path="partNumber=2")
    began = time.monotonic()
    try:
        with pytest.raises(StorageError, match=r"folder/large: no answer: .*; given up after [0-3] s of trying"):
            store.sink.publish("folder/large", write_three_parts, exclusive=True)
        took = time.monotonic() - began
    finally:
        proxy.start()
    assert took < 7 and rule.struck == 1
    assert server.keys(url) == [] and store.sink.unfinished("folder") == server.uploads(f"{url}/folder") == ["large"]
    store.sink.discard_unfinished("folder", "large")
    assert server.uploads(url) == []


def test_an_interrupt_while_the_storage_is_away_gets_through_at_once(
    store: Store, proxy: FaultyProxy, server: S3Server, url: str
) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(bytes(17 * MIB))
        proxy.stop()
        raise KeyboardInterrupt

    try:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.sink.publish("large", write, exclusive=True)
        took = time.monotonic() - began
    finally:
        proxy.start()
    assert took < 7 and server.keys(url) == []


def test_what_is_away_is_not_taken_for_damaged(
    url: str, options: dict[str, Any], proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGIC_STORAGE_PATIENCE_SECONDS", "0.5")
    store = Store(url, options=options)
    lease = Chain(store, "q").take()
    for step in (4, 3):
        lease.seal(step, {"rank0": state(step)}, FACTS)
    proxy.strike(SLOW_DOWN, method="GET", path="/blobs/", times=None)
    with pytest.raises(StorageError, match="given up"):
        lease.chain.newest(FACTS, order="lowest")
    proxy.heal()
    found = lease.chain.newest(FACTS, order="lowest")
    assert found and found.step == 3


def test_credentials_stand_nowhere_that_is_kept(store: Store, server: S3Server, proxy: FaultyProxy, url: str) -> None:
    chain = Chain(store, "q")
    lease = chain.take()
    lease.seal(4, {"rank0": state(4)}, FACTS)
    kept = b"".join(read(store.sink, found.path) for found in store.sink.tree(""))
    shown = [
        store.url,
        repr(store),
        repr(store.sink),
        repr(chain),
        repr(chain.newest(FACTS, order="lowest")),
        *server.keys(url),
    ]
    for secret in (server.key, server.secret, TOKEN):
        assert secret.encode() not in kept and not any(secret in text for text in shown)


def test_many_threads_share_a_connection(store: Store) -> None:
    written = {f"many/{number}": os.urandom(100_000) for number in range(40)}
    threads = [threading.Thread(target=publish, args=(store.sink, *item)) for item in written.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path: read(store.sink, path) for path in written} == written
