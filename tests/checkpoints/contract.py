"""What stores and chains promise on every backend. A backend's test file subclasses both classes and gives the `url` fixture.

What the sinks below them promise is in sink_contract.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magic_pipeline.checkpoints import COMPLETE_STEP, Blob, Chain, Holder, Store, tensors_digest
from magic_pipeline.errors import (
    DamagedObjectError,
    HeldError,
    InputError,
    LeaseLostError,
    MissingObjectError,
    ObjectExistsError,
    StorageError,
    StorageFullError,
)
from tests.checkpoints import breakage
from tests.checkpoints.breakage import DAMAGE

FACTS = {"training": "t1", "lanes": [1, 2], "lr": 0.1}
DTYPES = [
    torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def state(step: int, rank: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {"params/w": torch.randn(5, 7, generator=generator), "counters/n": torch.tensor(step)}


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and tensors_digest(found) == tensors_digest(expected)


def bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Any bits at all: among them NaNs with payloads, denormals, negative zeros."""
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def cases(values: Iterable[Any], ids: Iterable[str] | None = None) -> Any:
    """Parameters of which slow storage gets the first only."""
    named = zip(values, ids, strict=True) if ids is not None else ((value, None) for value in values)
    return [
        pytest.param(value, id=name, marks=[pytest.mark.repeats] if number else [])
        for number, (value, name) in enumerate(named)
    ]


class Preempted(BaseException):
    """As an orchestrator raises it at SIGTERM."""


class StoreContract:
    @pytest.mark.parametrize("dtype", cases(DTYPES, map(str, DTYPES)))
    def test_tensors_come_back_bitwise(self, store: Store, dtype: torch.dtype) -> None:
        tensors = {
            "matrix": bits(6, 4, dtype=dtype),
            "transposed": bits(6, 4, dtype=dtype).T,
            "every other": bits(8, dtype=dtype)[::2],
            "lane": bits(3, 2, 2, dtype=dtype)[1],
            "expanded": bits(1, dtype=dtype).expand(4),
            "scalar": bits(dtype=dtype),
            "empty": bits(0, 3, dtype=dtype),
            "ключ/é": bits(2, dtype=dtype),
        }
        found = store.read_blob("blobs", store.write_blob("blobs", tensors))
        assert list(found) == list(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            assert (
                found[name]
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .equal(tensor.contiguous().reshape(-1).view(torch.uint8))
            ), name

    def test_special_tensors_are_stored_by_value(self, store: Store) -> None:
        leaf = torch.nn.Parameter(torch.randn(3))
        conjugate = torch.randn(3, dtype=torch.complex64).conj()
        found = store.read_blob(
            "blobs", store.write_blob("blobs", {"leaf": leaf, "conjugate": conjugate, "sum": leaf * 2})
        )
        assert found["leaf"].equal(leaf) and not found["leaf"].requires_grad and not found["sum"].requires_grad
        assert found["conjugate"].equal(conjugate.resolve_conj())

    def test_a_lane_does_not_drag_the_other_lanes_along(self, store: Store) -> None:
        lanes = torch.randn(32, 10_000)
        blob = store.write_blob("blobs", {"lane": lanes[7], "part of a strided lane": lanes[3, ::2]})
        assert blob.size < 70_000
        assert store.read_blob("blobs", blob)["lane"].equal(lanes[7])

    @pytest.mark.parametrize(
        "tensor", cases([torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ["sparse", "meta"])
    )
    def test_a_tensor_without_dense_data_is_refused_by_name(self, store: Store, tensor: Tensor) -> None:
        with pytest.raises(TypeError, match=r"odd one"):
            store.write_blob("blobs", {"odd one": tensor})
        assert store.list("blobs") == []

    @pytest.mark.parametrize("damage", cases(DAMAGE.values(), DAMAGE))
    def test_a_damaged_blob_is_named_with_expected_and_found(self, store: Store, damage: Any) -> None:
        blob = store.write_blob("blobs", state(1))
        damage(store, f"blobs/{blob.name}")
        found = len(breakage.raw_bytes(store, f"blobs/{blob.name}"))
        reason = (
            f"{blob.size} bytes, found {found}$" if found != blob.size else f"digest {blob.digest}, found xxh3_128:"
        )
        for read in (store.read_blob, store.verify_blob):
            with pytest.raises(DamagedObjectError, match=f"{blob.name}: expected {reason}"):
                read("blobs", blob)

    @pytest.mark.parametrize("damage", cases(DAMAGE.values(), DAMAGE))
    def test_a_damaged_json_object_is_named(self, store: Store, damage: Any) -> None:
        store.create_json("plan.json", {"a b": [1, 2.5, None, True], "text": "x y" * 20})
        damage(store, "plan.json")
        with pytest.raises(DamagedObjectError, match=r"plan.json"):
            store.read_json("plan.json")

    @pytest.mark.parametrize(
        "content", cases([b"", b"{", b"{}", b"[]", b"null", b"\x00" * 40, b'{"content": {}, "digest": ""}'])
    )
    def test_garbage_is_damage_and_never_another_error(self, store: Store, content: bytes) -> None:
        breakage.overwrite(store, "plan.json", content)
        with pytest.raises(DamagedObjectError, match=r"plan.json"):
            store.read_json("plan.json")

    def test_missing_objects_are_named(self, store: Store, tmp_path: Path) -> None:
        blob = Blob("nothing.pt", 3, "xxh3_128:00")
        for read in (
            lambda: store.read_json("a/b.json"),
            lambda: store.read_blob("a", blob),
            lambda: store.verify_blob("a", blob),
        ):
            with pytest.raises(MissingObjectError, match=r"a/(b.json|nothing.pt)"):
                read()
        with pytest.raises(MissingObjectError):
            store.fetch_file("a", blob, tmp_path / "target")
        assert list(tmp_path.glob("target*")) == []

    def test_json_comes_back_as_it_was(self, store: Store) -> None:
        content: dict[str, Any] = {
            "text": 'é\n"\ud800',
            "numbers": [0, -0.0, 1e-300, 2**70],
            "none": None,
            "nested": {"b": {}, "a": []},
        }
        store.create_json("x/y.json", content)
        assert store.read_json("x/y.json") == content
        assert str(store.read_json("x/y.json")["numbers"][1]) == "-0.0"

    def test_create_only_keeps_the_first(self, store: Store) -> None:
        store.create_json("one.json", {"n": 1})
        with pytest.raises(ObjectExistsError, match=r"one.json"):
            store.create_json("one.json", {"n": 2})
        assert store.read_json("one.json") == {"n": 1}
        store.replace_json("one.json", {"n": 3})
        assert store.read_json("one.json") == {"n": 3}

    def test_listing_is_direct_children_sorted_and_never_stale(
        self, store: Store, open_store: Callable[[], Store]
    ) -> None:
        other = open_store()
        assert other.list("f") == [] and not other.exists("f/b.json")
        for name in ("f/b.json", "f/a.json", "f/sub/c.json", "g/d.json"):
            store.create_json(name, {})
        assert other.list("f") == ["a.json", "b.json", "sub"] and other.exists("f/b.json")
        store.delete("f/b.json")
        store.delete("f/b.json")
        store.delete("nowhere/b.json")
        assert other.list("f") == ["a.json", "sub"] and not other.exists("f/b.json")

    @pytest.mark.parametrize("path", cases(["../x", "/x", "a//b", "a/.hidden", "", "a/../../b"]))
    def test_paths_cannot_leave_the_store(self, store: Store, path: str) -> None:
        for use in (store.exists, store.delete, store.list, store.read_json, lambda p: store.create_json(p, {})):
            with pytest.raises(ValueError, match=r"expected parts"):
                use(path)

    def test_files_come_back_or_leave_the_target_alone(self, store: Store, tmp_path: Path) -> None:
        source, target = tmp_path / "scores.parquet", tmp_path / "out" / "copy.parquet"
        source.write_bytes(bytes(range(256)) * 40_000)
        blob = store.write_file("scores", source, ".parquet")
        assert blob.name.endswith(".parquet") and blob.size == source.stat().st_size
        store.fetch_file("scores", blob, target)
        assert target.read_bytes() == source.read_bytes()
        target.write_text("mine")
        breakage.flip_a_bit(store, f"scores/{blob.name}")
        with pytest.raises(DamagedObjectError, match=blob.name):
            store.fetch_file("scores", blob, target)
        assert target.read_text() == "mine" and [path.name for path in target.parent.iterdir()] == ["copy.parquet"]

    @pytest.mark.parametrize(
        "error", cases([Preempted(), KeyboardInterrupt(), ValueError("x"), OSError(28, "No space left on device")])
    )
    @pytest.mark.parametrize("after", cases([2, 0]))
    def test_a_failure_inside_a_save_publishes_nothing(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int
    ) -> None:
        fail_in_write(monkeypatch, error, after)
        # torch passes some exceptions on and hides others in a RuntimeError; only those that matter are dug out.
        expected = (StorageError,) if isinstance(error, OSError) else (type(error), RuntimeError)
        with pytest.raises(expected) as caught:
            store.write_blob("blobs", state(1))
        if not isinstance(error, Exception):
            assert caught.value is error
        if isinstance(error, OSError):
            assert "no space left after" in str(caught.value) and "blobs/" in str(caught.value)
        assert store.list("blobs") == [] and store.sink.unfinished("blobs") == []

    def test_an_interrupt_that_was_handled_before_the_save_is_not_the_saves_own(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fail_in_write(monkeypatch, OSError(28, "No space left on device"), 1)
        try:
            raise Preempted
        except Preempted:
            with pytest.raises(StorageFullError, match=r"no space left"):
                store.write_blob("blobs", state(1))

    def test_a_number_that_json_lacks_is_refused_by_place(self, store: Store) -> None:
        with pytest.raises(InputError, match=r"a\.b\[1\]: expected a finite number, found nan"):
            store.create_json("x.json", {"a": {"b": [1, float("nan")]}})
        assert not store.exists("x.json")


def fail_in_write(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int) -> None:
    """Makes the stream that torch.save writes to raise after some writes, as a disk or a signal would."""
    from magic_pipeline.checkpoints import store as module

    count, write = 0, module._HashingWriter.write

    def failing(self: Any, content: Any) -> int:
        nonlocal count
        count += 1
        if count > after:
            raise error
        return write(self, content)

    monkeypatch.setattr(module._HashingWriter, "write", failing)


class ChainContract:
    @pytest.fixture
    def chain(self, store: Store) -> Chain:
        return Chain(store, "queries/q-1/abc")

    @pytest.fixture(autouse=True)
    def catch_warnings(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, "magic_pipeline.checkpoints")

    def test_layout_on_storage(self, store: Store, chain: Chain) -> None:
        lease = chain.take()
        checkpoint = lease.seal(12, {"rank0": state(12)}, FACTS)
        lease.complete({"scores": state(0)}, FACTS)
        lease.release()
        assert store.list("queries/q-1/abc") == ["blobs", "complete.e00000001.json", "epochs", "manifests"]
        assert store.list(chain.manifests) == ["00000012.e00000001.json"]
        assert store.list(chain.epochs) == ["00000001.json", "00000001.released.json"]
        assert checkpoint.path == "queries/q-1/abc/manifests/00000012.e00000001.json"
        assert store.read_json(checkpoint.path) == {
            "schema": 1, "step": 12, "epoch": 1, "facts": FACTS,
            "blobs": {"rank0": checkpoint.blobs["rank0"].as_json()},
        }  # fmt: skip

    def test_newest_goes_by_step_in_either_order(self, chain: Chain) -> None:
        assert chain.newest(FACTS, order="lowest") is None and chain.load(3, FACTS) is None
        lease = chain.take()
        for step in (5, 3, 9):
            lease.seal(step, {"rank0": state(step), "rank1": state(step, 1)}, {**FACTS, "tuple": (1,)})
        lowest, highest = (chain.newest({**FACTS, "tuple": (1,)}, order=order) for order in ("lowest", "highest"))
        assert lowest and highest and (lowest.step, highest.step) == (3, 9)
        assert same_bits(lowest.tensors("rank0"), state(3)) and same_bits(lowest.tensors("rank1"), state(3, 1))
        assert chain.completed(FACTS) is None
        lease.complete({"scores": state(0)}, FACTS)
        completed = chain.completed(FACTS)
        assert completed and completed.step == COMPLETE_STEP and same_bits(completed.tensors("scores"), state(0))

    @pytest.mark.parametrize("damage", cases([*DAMAGE.values(), breakage.remove], [*DAMAGE, "remove"]))
    @pytest.mark.parametrize("target", cases(["rank1", "rank0", "manifest"]))
    def test_damage_costs_a_warning_and_one_checkpoint(
        self, chain: Chain, caplog: pytest.LogCaptureFixture, target: str, damage: Any
    ) -> None:
        lease = chain.take()
        for step in (5, 4):
            checkpoint = lease.seal(step, {"rank0": state(step), "rank1": state(step, 1)}, FACTS)
        path = checkpoint.path if target == "manifest" else f"{chain.blobs}/{checkpoint.blobs[target].name}"
        damage(chain.store, path)
        found = chain.newest(FACTS, order="lowest")
        assert found and found.step == 5 and same_bits(found.tensors("rank1"), state(5, 1))
        if (target, damage) != ("manifest", breakage.remove):
            assert len(caplog.records) == 1 and checkpoint.path in caplog.text and path in caplog.text
            assert [finding.object for finding in chain.audit() if finding.kind == "damaged"] == [path]
        caplog.clear()
        lease.seal(4, {"rank0": state(4), "rank1": state(4, 1)}, FACTS)
        again = chain.newest(FACTS, order="lowest")
        assert again and again.step == 4 and same_bits(again.tensors("rank0"), state(4))

    def test_sealing_over_damage_takes_a_new_epoch_and_overwrites_nothing(self, chain: Chain) -> None:
        lease = chain.take()
        checkpoint = lease.seal(4, {"rank0": state(4)}, FACTS)
        breakage.flip_a_bit(chain.store, f"{chain.blobs}/{checkpoint.blobs['rank0'].name}")
        before = breakage.raw_bytes(chain.store, checkpoint.path)
        assert lease.seal(4, {"rank0": state(4)}, FACTS).epoch == lease.epoch == 2
        assert breakage.raw_bytes(chain.store, checkpoint.path) == before
        with pytest.raises(ObjectExistsError, match=r"00000004.e00000002.json: is sealed already, and whole"):
            lease.seal(4, {"rank0": state(4)}, FACTS)
        lease.seal(3, {"rank0": state(3)}, FACTS)
        lease.seal(2, {"rank0": state(2)}, FACTS)
        lease.retire(order="lowest")
        assert chain.sealed() == [(2, 2), (3, 2)]
        lease.release()
        assert chain.take().epoch == 3

    def test_a_damaged_object_in_the_place_of_a_manifest_does_not_stop_the_seal(self, chain: Chain) -> None:
        lease = chain.take()
        breakage.overwrite(chain.store, f"{chain.manifests}/00000004.e00000001.json", b"")
        breakage.overwrite(chain.store, f"{chain.folder}/complete.e00000002.json", b"{")
        assert lease.seal(4, {"rank0": state(4)}, FACTS).epoch == 3

    def test_a_damaged_completion_is_completed_again(self, chain: Chain) -> None:
        lease = chain.take()
        breakage.empty(chain.store, lease.complete({"scores": state(0)}, FACTS).path)
        assert chain.completed(FACTS) is None
        lease.complete({"scores": state(0)}, FACTS)
        completed = chain.completed(FACTS)
        assert completed and completed.epoch == 2

    def test_swapped_blobs_and_swapped_manifests_are_found(
        self, chain: Chain, caplog: pytest.LogCaptureFixture
    ) -> None:
        lease, store = chain.take(), chain.store
        one, two, three = (lease.seal(step, {"rank0": state(step)}, FACTS) for step in (1, 2, 3))
        paths = [f"{chain.blobs}/{checkpoint.blobs['rank0'].name}" for checkpoint in (one, two)]
        contents = [breakage.raw_bytes(store, path) for path in paths]
        assert len(contents[0]) == len(contents[1])
        for path, content in zip(paths, reversed(contents), strict=True):
            breakage.overwrite(store, path, content)
        found = chain.newest(FACTS, order="lowest")
        assert found and found.step == 3
        assert [record.getMessage().count("expected digest") for record in caplog.records] == [1, 1]
        breakage.overwrite(store, f"{chain.manifests}/00000000.e00000001.json", breakage.raw_bytes(store, three.path))
        assert chain.load(0, FACTS) is None and "another checkpoint's manifest" in caplog.text

    def test_foreign_checkpoints_name_every_mismatch(self, chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
        lease = chain.take()
        lease.seal(5, {"rank0": state(5)}, FACTS)
        lease.seal(4, {"rank0": state(4)}, {**FACTS, "lr": 0.2, "training": "t2"})
        found = chain.newest({**FACTS}, order="lowest")
        assert found and found.step == 5
        (record,) = caplog.records
        assert 'training: expected "t1", found "t2"' in record.getMessage()
        assert "lr: expected 0.1, found 0.2" in record.getMessage() and "00000004.e00000001" in record.getMessage()
        assert (
            chain.newest({"query": "q"}, order="lowest") is None and 'query: expected "q", found nothing' in caplog.text
        )
        assert chain.load(5, {"lanes": [1, 2.0]}) is None  # 2 and 2.0 are two values

    def test_another_schema_is_foreign_and_kept(self, chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
        lease = chain.take()
        sealed = lease.seal(4, {"rank0": state(4)}, FACTS)
        content = {**chain.store.read_json(sealed.path), "schema": 99}
        chain.store.replace_json(sealed.path, content)
        assert chain.load(4, FACTS) is None and "expected schema 1, found 99" in caplog.text
        assert [(f.object, f.kind) for f in chain.audit()] == [(sealed.path, "foreign-schema")]
        lease.complete({"scores": state(0)}, FACTS)
        lease.clear()
        assert chain.store.exists(sealed.path) and chain.store.exists(f"{chain.blobs}/{sealed.blobs['rank0'].name}")

    def test_retire_keeps_two_generations_and_is_idempotent(self, chain: Chain) -> None:
        lease = chain.take()
        for step in (5, 4, 3, 2):
            lease.seal(step, {"rank0": state(step)}, FACTS)
        lease.retire(order="lowest")
        lease.retire(order="lowest")
        assert chain.sealed() == [(2, 1), (3, 1)] and len(chain.store.list(chain.blobs)) == 2
        lease.retire(order="highest", keep=1)
        assert chain.sealed() == [(3, 1)] and chain.audit() == []

    def test_retire_removes_nothing_while_the_newest_is_damaged(
        self, chain: Chain, caplog: pytest.LogCaptureFixture
    ) -> None:
        lease = chain.take()
        sealed = [lease.seal(step, {"rank0": state(step)}, FACTS) for step in (5, 4, 3)]
        # What is far away is not read again each time: its upload was checked, and then its size is.
        damage = breakage.flip_a_bit if chain.store.sink.reads_back else breakage.truncate
        damage(chain.store, f"{chain.blobs}/{sealed[-1].blobs['rank0'].name}")
        lease.retire(order="lowest", keep=1)
        assert chain.sealed() == [(3, 1), (4, 1), (5, 1)] and sealed[-1].blobs["rank0"].name in caplog.text

    def test_retire_leaves_other_epochs_alone(self, chain: Chain) -> None:
        first = chain.take()
        first.seal(9, {"rank0": state(9)}, FACTS)
        second = chain.take()
        for step in (8, 7):
            second.seal(step, {"rank0": state(step)}, FACTS)
        second.retire(order="lowest", keep=1)
        assert chain.sealed() == [(7, 2), (9, 1)]

    def test_clear_leaves_the_completion_only(self, chain: Chain) -> None:
        first = chain.take()
        first.seal(9, {"rank0": state(9)}, FACTS)
        chain.store.write_blob(chain.blobs, state(1), prefix="e00000001-")
        second = chain.take()
        second.seal(8, {"rank0": state(8)}, FACTS)
        with pytest.raises(StorageError, match=r"not complete"):
            second.clear()
        assert len(chain.sealed()) == 2
        complete = second.complete({"scores": state(0)}, FACTS)
        assert [finding.kind for finding in chain.audit()] == ["orphaned"]
        second.clear(FACTS)
        second.clear()
        assert chain.sealed() == [] and chain.store.list(chain.blobs) == [complete.blobs["scores"].name]
        assert chain.audit() == [] and chain.completed(FACTS)

    def test_another_process_is_refused_while_the_holder_lives(self, chain: Chain) -> None:
        lease = chain.take(Holder.this_process("run-7"))
        asking = Holder(**{**Holder.this_process("run-8").as_json(), "pid": 1})
        with pytest.raises(HeldError, match=r"held by run run-7, process") as caught:
            chain.take(asking)
        assert caught.value.holder["run_id"] == "run-7" and f"{chain.epochs}/00000001.released.json" in str(
            caught.value
        )
        lease.release()
        lease.release()
        assert chain.take(asking).epoch == 2

    def test_a_holder_elsewhere_is_believed_until_released_by_hand(self, chain: Chain) -> None:
        elsewhere = Holder("run-1", "another-host", "m", "b", "n", 1, "ticks:1")
        chain.take(elsewhere)
        with pytest.raises(HeldError, match=r"cannot look at.*creating an empty object") as caught:
            chain.take()
        path = str(caught.value).rpartition(" ")[2].removeprefix(f"{chain.store.url}/")
        breakage.overwrite(chain.store, path, b"")
        assert chain.take().epoch == 2

    def test_a_process_may_take_over_from_itself(self, chain: Chain) -> None:
        first, second = chain.take(), chain.take()
        assert (first.epoch, second.epoch) == (1, 2)
        with pytest.raises(LeaseLostError, match=r"epoch 1 was taken over by epoch 2"):
            first.seal(4, {"rank0": state(4)}, FACTS)
        assert chain.sealed() == []

    @pytest.mark.parametrize("damage", cases(DAMAGE.values(), DAMAGE))
    def test_a_damaged_epoch_never_blocks(self, chain: Chain, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
        first = chain.take(Holder("run-1", "another-host", "m", "b", "n", 1, "ticks:1"))
        damage(chain.store, chain.epoch_path(1))
        second = chain.take()
        assert second.epoch == 2 and "does not say who holds the lease" in caplog.text
        with pytest.raises(LeaseLostError):
            first.seal(4, {"rank0": state(4)}, FACTS)

    def test_removed_epochs_are_never_given_out_again(self, chain: Chain) -> None:
        lease = chain.take()
        lease.seal(4, {"rank0": state(4)}, FACTS)
        chain.store.delete(chain.epoch_path(1))
        with pytest.raises(LeaseLostError, match=r"was removed"):
            lease.seal(3, {"rank0": state(3)}, FACTS)
        assert chain.take().epoch == 2

    def test_who_slept_while_everything_was_deleted_does_not_write_under_anothers_epoch(self, chain: Chain) -> None:
        zombie = chain.take(Holder("run-1", "another-host", "m", "b", "n", 1, "ticks:1"))
        chain.store.delete(chain.epoch_path(1))
        owner = chain.take()
        assert owner.epoch == zombie.epoch == 1
        with pytest.raises(LeaseLostError, match=r"it is another's now"):
            zombie.seal(4, {"rank0": state(4)}, FACTS)
        owner.seal(4, {"rank0": state(4)}, FACTS)
        assert chain.sealed() == [(4, 1)]

    def test_an_overtaken_writer_is_refused_everything(self, chain: Chain) -> None:
        zombie = chain.take()
        for step in (6, 5, 4):
            zombie.seal(step, {"rank0": state(step)}, FACTS)
        owner = chain.take()
        owner.complete({"scores": state(0)}, FACTS)
        for write in (
            lambda: zombie.seal(3, {"rank0": state(3)}, FACTS),
            lambda: zombie.complete({"scores": state(0)}, FACTS),
            lambda: zombie.retire(order="lowest", keep=1),
            zombie.clear,
            zombie.sweep,
        ):
            with pytest.raises(LeaseLostError):
                write()
        assert chain.sealed() == [(4, 1), (5, 1), (6, 1)]

    def test_a_late_manifest_of_an_overtaken_writer_is_harmless(
        self, chain: Chain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        zombie = chain.take()
        owner = chain.take()
        owner.seal(4, {"rank0": state(4)}, FACTS)
        monkeypatch.setattr(zombie, "check", lambda: None)  # it looked just before the owner took over
        zombie.seal(4, {"rank0": state(40)}, FACTS)
        found = chain.newest(FACTS, order="lowest")
        assert found and found.epoch == owner.epoch and same_bits(found.tensors("rank0"), state(4))
        zombie.seal(3, {"rank0": state(3)}, FACTS)  # further than the owner, and as whole as any other
        found = chain.newest(FACTS, order="lowest")
        assert found and found.step == 3 and same_bits(found.tensors("rank0"), state(3))
        owner.complete({"scores": state(0)}, FACTS)
        owner.clear()
        assert chain.sealed() == [] and chain.audit() == []

    def test_a_take_over_during_the_writing_of_blobs_stops_the_commit(
        self, chain: Chain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, write = chain.take(), chain.store.write_blob

        def write_and_lose(*args: Any, **kwargs: Any) -> Blob:
            chain.take()
            return write(*args, **kwargs)

        monkeypatch.setattr(chain.store, "write_blob", write_and_lose)
        with pytest.raises(LeaseLostError):
            lease.seal(4, {"rank0": state(4)}, FACTS)
        assert chain.sealed() == []

    def test_a_released_lease_writes_no_more(self, chain: Chain) -> None:
        with chain.take() as lease:
            lease.seal(4, {"rank0": state(4)}, FACTS)
        with pytest.raises(LeaseLostError, match=r"was released"):
            lease.seal(3, {"rank0": state(3)}, FACTS)

    def test_audit_of_a_whole_chain_finds_nothing_and_of_strangers_something(self, chain: Chain) -> None:
        lease = chain.take()
        lease.seal(4, {"rank0": state(4)}, FACTS)
        assert chain.audit() == []
        chain.store.create_json(f"{chain.manifests}/note.json", {})
        blob = chain.store.write_blob(chain.blobs, state(4), prefix="e00000001-")
        findings = {finding.object: finding for finding in chain.audit()}
        assert {finding.kind for finding in findings.values()} == {"orphaned"} and len(findings) == 2
        assert "may be about to seal" in findings[f"{chain.blobs}/{blob.name}"].detail
        lease.sweep()
        assert len(chain.audit()) == 1
