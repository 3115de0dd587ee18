"""What every sink promises: an object is there as a whole or not at all, and listings tell the truth.

A backend's test file subclasses SinkContract and gives the `url` fixture, and `options` or `open_store` where it takes more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, ClassVar

import pytest
import torch

from magic_pipeline.checkpoints import Store
from magic_pipeline.checkpoints.sinks import Sink
from magic_pipeline.errors import DamagedObjectError, MissingObjectError, ObjectExistsError, StorageError
from tests.checkpoints.contract import Preempted, bits, cases, same_bits
from tests.checkpoints.other_process import other_process

MIB = 2**20
LARGE = 20 * MIB + 12_345  # three parts of a multipart upload
# Not a backslash: some servers take it for a slash.
ODD_NAMES = (
    "é|ß", "two words", "100%2F", "1+1=2", "a&b?c#d", "~'\"(x)!*", "日本語", ",;:@$", "k=v", "x" * 200, "[a]{b}<c>",
)  # fmt: skip


def content(size: int = LARGE) -> bytes:
    block = os.urandom(MIB + 7)
    return (block * (size // len(block) + 1))[:size]


def publish(sink: Sink, path: str, written: bytes, *, exclusive: bool = False) -> None:
    def write(stream: BinaryIO) -> None:
        for start in range(0, len(written), MIB):  # noqa: FURB122 - a sink's stream has `write` and no more
            stream.write(written[start : start + MIB])

    sink.publish(path, write, exclusive=exclusive, size=len(written))


def read(sink: Sink, path: str) -> bytes:
    with sink.fetch(path) as stream:
        return stream.read()


class SinkContract:
    """
    Attributes:
        exclusive: the backend creates exclusively.
        atomic: an object is replaced all at once; elsewhere half an object can be seen, and is taken for damaged.
        keeps_unfinished: what a killed writer leaves takes space, and is found,
        dates_unfinished: with the time of its beginning.
        many: objects to list; more than the backend tells in one answer.
        races: how many to run.
    """

    exclusive: ClassVar[bool] = True
    atomic: ClassVar[bool] = True
    keeps_unfinished: ClassVar[bool] = True
    dates_unfinished: ClassVar[bool] = True
    many: ClassVar[int] = 1001
    races: ClassVar[int] = 8

    @pytest.fixture
    def sink(self, store: Store) -> Sink:
        return store.sink

    @pytest.mark.parametrize("size", cases([LARGE, 16 * MIB, 8 * MIB, 8 * MIB + 1, 1, 0]))
    def test_bytes_come_back_and_their_number_without_reading_them(self, sink: Sink, size: int) -> None:
        written = content(size)
        publish(sink, "folder/object", written, exclusive=True)
        assert sink.size("folder/object") == size and read(sink, "folder/object") == written
        assert sink.exists("folder/object") and sink.unfinished("folder") == []

    def test_an_empty_object_is_there(self, sink: Sink) -> None:
        publish(sink, "folder/empty", b"")
        assert sink.exists("folder/empty") and sink.size("folder/empty") == 0 and read(sink, "folder/empty") == b""
        assert sink.list("folder") == ["empty"] and [found.size for found in sink.tree("folder")] == [0]

    def test_a_blob_of_several_parts_comes_back_bitwise(self, store: Store) -> None:
        tensors = {"large": bits(LARGE // 4, dtype=torch.float32), "small": bits(3, dtype=torch.int8)}
        blob = store.write_blob("blobs", tensors)
        assert store.size(f"blobs/{blob.name}") == blob.size > LARGE
        assert same_bits(store.read_blob("blobs", blob), tensors)

    def test_a_stream_is_sought_in_like_a_file(self, sink: Sink) -> None:
        publish(sink, "object", b"0123456789")
        with sink.fetch("object") as stream:
            assert stream.read(4) == b"0123" and stream.seek(8) == 8 and stream.read() == b"89"
            stream.seek(0)
            assert stream.tell() == 0 and stream.read() == b"0123456789"

    def test_what_is_not_there_has_no_size_no_bytes_and_no_names(self, sink: Sink) -> None:
        publish(sink, "folder/object", b"x")
        assert sink.size("folder") is None
        for path in ("nothing", "folder/obj", "folder/object2", "nowhere/object"):
            assert sink.size(path) is None and not sink.exists(path), path
            with pytest.raises(MissingObjectError, match=path), sink.fetch(path):
                pass
            sink.delete(path)
        for folder in ("nothing", "fold", "folder2", "nowhere/deep"):
            assert sink.list(folder) == sink.unfinished(folder) == [] == list(sink.tree(folder)), folder
            assert list(sink.unfinished_tree(folder)) == []
        assert sink.list("folder") == ["object"]

    def test_a_tree_is_every_object_at_any_depth_with_size_and_age(self, sink: Sink) -> None:
        began = time.time()
        sizes = {"a/1": 1, "a/b/2": 2, "a/b/c/d/3": 3, "ab/4": 4, "5": 5}
        for path, size in sizes.items():
            publish(sink, path, bytes(size))
        found = {entry.path: entry for entry in sink.tree("")}
        assert {path: entry.size for path, entry in found.items()} == sizes
        # S3 tells whole seconds.
        assert all(began - 2 < entry.modified < time.time() + 2 for entry in found.values())
        assert sorted(entry.path for entry in sink.tree("a")) == ["a/1", "a/b/2", "a/b/c/d/3"]
        assert sorted(entry.path for entry in sink.tree("a/b/c")) == ["a/b/c/d/3"]
        sink.delete("a/b/c/d/3")
        # A folder may stay, with nothing in it.
        assert list(sink.tree("a/b/c")) == [] and sink.list("a/b/c/d") == []

    def test_a_thousand_objects_and_more_are_listed_completely(self, sink: Sink) -> None:
        names = [f"{number:05d}.json" for number in range(self.many)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: publish(sink, f"many/{name}", b"{}"), names))
        assert sink.list("many") == names
        assert sorted(found.path for found in sink.tree("many")) == [f"many/{name}" for name in names]

    def test_odd_names_survive(self, sink: Sink) -> None:
        for number, name in enumerate(ODD_NAMES):
            publish(sink, f"odd é|+ %41/{name}/{name}.json", bytes([number]), exclusive=True)
        for number, name in enumerate(ODD_NAMES):
            path = f"odd é|+ %41/{name}/{name}.json"
            assert read(sink, path) == bytes([number]) and sink.size(path) == 1 and sink.exists(path), name
            assert sink.list(f"odd é|+ %41/{name}") == [f"{name}.json"]
            with pytest.raises(ObjectExistsError):
                publish(sink, path, b"", exclusive=True)
        assert sink.list("odd é|+ %41") == sorted(ODD_NAMES) and sink.list("") == ["odd é|+ %41"]
        found = {entry.path for entry in sink.tree("odd é|+ %41")}
        assert found == {f"odd é|+ %41/{name}/{name}.json" for name in ODD_NAMES}
        for path in found:
            sink.delete(path)
        assert list(sink.tree("")) == []

    def test_of_concurrent_creations_exactly_one_wins(self, sink: Sink) -> None:
        start = threading.Barrier(8)

        def create(number: int) -> int | None:
            start.wait(60)
            try:
                publish(sink, f"race/{attempt}", bytes([number] * 1000), exclusive=True)
            except ObjectExistsError:
                return None
            return number

        with ThreadPoolExecutor(8) as threads:
            for attempt in range(self.races):
                won = [number for number in threads.map(create, range(8)) if number is not None]
                assert read(sink, f"race/{attempt}") in [bytes([number] * 1000) for number in won]
                assert len(won) == 1 or not self.exclusive
        assert sink.unfinished("race") == []

    def test_of_two_large_objects_of_one_name_the_first_that_is_whole_wins(self, sink: Sink) -> None:
        first, second = content(), content()

        def write(stream: BinaryIO) -> None:
            stream.write(second[: 16 * MIB])
            publish(sink, "object", first, exclusive=True)
            stream.write(second[16 * MIB :])

        with pytest.raises(ObjectExistsError, match="object"):
            sink.publish("object", write, exclusive=True)
        assert read(sink, "object") == first and list(sink.unfinished_tree("")) == []

    def test_whether_creation_is_exclusive_is_known_and_the_probe_leaves_nothing(self, sink: Sink) -> None:
        assert sink.creates_exclusively() is self.exclusive
        assert list(sink.tree("")) == [] and list(sink.unfinished_tree("")) == []

    def test_free_space_is_a_number_of_bytes_or_unknown(self, sink: Sink) -> None:
        free = sink.free_bytes()
        assert free is None or free > MIB

    @pytest.mark.parametrize("error", cases([Preempted(), KeyboardInterrupt(), ValueError("x"), GeneratorExit()]))
    @pytest.mark.parametrize("after", cases([LARGE, 8 * MIB, 10, 0]))
    def test_an_exception_in_the_middle_publishes_nothing_and_leaves_nothing(
        self, sink: Sink, error: BaseException, after: int
    ) -> None:
        def write(stream: BinaryIO) -> None:
            stream.write(bytes(after))
            raise error

        publish(sink, "folder/old", b"old")
        for path, exclusive in (("folder/new", True), ("folder/old", False)):
            with pytest.raises(type(error)) as caught:
                sink.publish(path, write, exclusive=exclusive)
            assert caught.value is error
        assert sink.list("folder") == ["old"] and read(sink, "folder/old") == b"old"
        assert sink.unfinished("folder") == [] and list(sink.unfinished_tree("")) == []

    def test_a_replaced_object_is_the_former_or_the_new_one_at_every_moment(self, store: Store) -> None:
        store.replace_json("state.json", {"number": 0, "text": "x"})
        done = threading.Event()

        def replace() -> None:
            try:
                for number in range(1, 40):
                    store.replace_json("state.json", {"number": number, "text": "x" * (number * 997 % 5000)})
            finally:
                done.set()

        seen = []
        with ThreadPoolExecutor(1) as threads:
            replacing = threads.submit(replace)
            while not done.is_set():
                try:
                    seen.append(store.read_json("state.json")["number"])
                except DamagedObjectError:
                    assert not self.atomic
            replacing.result()
        assert seen == sorted(seen) and store.read_json("state.json")["number"] == 39

    def test_a_writer_whose_upload_is_discarded_fails_and_publishes_nothing(self, sink: Sink) -> None:
        def write(stream: BinaryIO) -> None:
            stream.write(bytes(17 * MIB))
            assert sink.unfinished("folder") == (["object"] if self.keeps_unfinished else [])
            sink.discard_unfinished("folder", "object")
            stream.write(bytes(9 * MIB))

        if self.keeps_unfinished:
            with pytest.raises(StorageError, match="folder/object"):
                sink.publish("folder/object", write, exclusive=True)
        else:
            sink.publish("folder/object", write, exclusive=True)
        assert sink.exists("folder/object") is not self.keeps_unfinished and list(sink.unfinished_tree("")) == []

    def test_another_view_of_the_same_storage_is_the_same(self, sink: Sink, open_store: Callable[[], Store]) -> None:
        other = open_store().sink
        assert other.url == sink.url and other.list("folder") == []
        publish(sink, "folder/object", b"x")
        assert other.list("folder") == ["object"] and read(other, "folder/object") == b"x"


class SharedSinkContract(SinkContract):
    """What holds between processes, for backends that several can open."""

    def test_of_two_processes_that_create_the_same_names_each_is_won_by_one(
        self, store: Store, url: str, options: dict[str, Any]
    ) -> None:
        paths = [f"race/{number}.json" for number in range(20)]
        with other_process("create", url, options) as one, other_process("create", url, options) as two:
            one.tell({"paths": paths, "by": "one"})
            two.tell({"paths": paths[::-1], "by": "two"})
            won = {"one": one.hear(), "two": two.hear()}
        assert set(won["one"] + won["two"]) == set(paths) and won["one"] and won["two"]
        if self.exclusive:
            assert len(won["one"] + won["two"]) == len(paths)
            assert all(store.read_json(path) == {"by": by} for by, mine in won.items() for path in mine)

    def test_what_a_killed_writer_was_at_is_invisible_and_is_found_and_freed(
        self, sink: Sink, url: str, options: dict[str, Any]
    ) -> None:
        began = time.time()
        with other_process("die_while_writing", url, options) as other:
            other.tell({"path": "a/b/killed.pt"})
            assert other.process.wait(60) == -9
        assert not sink.exists("a/b/killed.pt") and sink.size("a/b/killed.pt") is None
        assert sink.list("a/b") == [] and list(sink.tree("")) == []
        found = list(sink.unfinished_tree(""))
        assert [entry.path for entry in found] == (["a/b/killed.pt"] if self.keeps_unfinished else [])
        assert [entry.path for entry in sink.unfinished_tree("a")] == [entry.path for entry in found]
        assert list(sink.unfinished_tree("b")) == [] and sink.unfinished("a") == []
        if self.dates_unfinished:
            assert all(began - 2 < entry.modified < time.time() + 2 for entry in found)
        assert sink.unfinished("a/b") == (["killed.pt"] if self.keeps_unfinished else [])
        sink.discard_unfinished("a/b", "killed")
        assert len(list(sink.unfinished_tree(""))) == len(found)
        sink.discard_unfinished("a/b", "killed.pt")
        sink.discard_unfinished("a/b", "killed.pt")
        assert list(sink.unfinished_tree("")) == [] and sink.unfinished("a/b") == []
        publish(sink, "a/b/killed.pt", b"again", exclusive=True)
        assert read(sink, "a/b/killed.pt") == b"again"

    def test_a_listing_is_never_stale_between_two_processes(
        self, store: Store, url: str, options: dict[str, Any]
    ) -> None:
        with other_process("list_folder", url, options) as other:
            for names in (["a.json"], ["a.json", "b.json"], ["b.json"], []):
                for name in {"a.json", "b.json"} - set(names):
                    store.delete(f"folder/{name}")
                for name in names:
                    store.replace_json(f"folder/{name}", {})
                other.tell({"folder": "folder"})
                assert other.hear() == store.list("folder") == names
