"""Any sequence of chain operations and damage agrees with a dictionary."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from magic_pipeline.checkpoints import Chain, SealedName, Store
from magic_pipeline.errors import LeaseLostError, ObjectExistsError, StorageError
from tests.checkpoints import breakage
from tests.checkpoints.contract import FACTS, same_bits, state
from tests.servers.s3_server import S3Server

steps = st.integers(0, 4)


class ChainMachine(RuleBasedStateMachine):
    def __init__(self, store: Store | None = None) -> None:
        super().__init__()
        self.chain = Chain(store or Store(f"memory://{uuid.uuid4().hex}"), "q")
        self.whole: dict[SealedName, bool] = {}  # every manifest that is there, and whether it can be used
        self.same_size: set[SealedName] = set()  # those with a damaged blob that its size does not give away
        self.complete = False
        self.lease = self.chain.take()
        self.lost = [self.lease][:0]
        self.own = {1}

    @rule(step=steps)
    def seal(self, step: int) -> None:
        here = SealedName(step, self.lease.epoch)
        if self.whole.get(here):
            with pytest.raises(ObjectExistsError):
                self.lease.seal(step, {"rank0": state(step)}, FACTS)
            return
        before = self.lease.epoch
        sealed = self.lease.seal(step, {"rank0": state(step)}, FACTS)
        assert sealed.epoch == self.lease.epoch == before + (here in self.whole)
        self.own.add(sealed.epoch)
        self.whole[SealedName(step, sealed.epoch)] = True

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), blob=st.booleans(), damage=st.sampled_from([*breakage.DAMAGE.values()]))
    def damage(self, data: st.DataObject, blob: bool, damage: object) -> None:
        usable = [name for name, whole in self.whole.items() if whole]
        if usable:
            name = data.draw(st.sampled_from(sorted(usable)))
            part = self.chain.manifest(name).blobs["rank0"]
            damage(self.chain.store, f"{self.chain.blobs}/{part.name}" if blob else self.chain.path(name))  # type: ignore[operator]
            self.whole[name] = False
            if blob and damage in (breakage.flip_a_bit, breakage.zero_a_range):
                self.same_size.add(name)

    @rule(release=st.booleans())
    def take(self, release: bool) -> None:
        if release:
            self.lease.release()
        self.lost.append(self.lease)
        self.lease = self.chain.take()
        self.own = {self.lease.epoch}

    @precondition(lambda self: self.lost)
    @rule(step=steps)
    def write_with_a_lost_lease(self, step: int) -> None:
        with pytest.raises(LeaseLostError):
            self.lost[-1].seal(step, {"rank0": state(step)}, FACTS)

    @rule(order=st.sampled_from(["lowest", "highest"]), keep=st.integers(1, 3))
    def retire(self, order: str, keep: int) -> None:
        self.lease.retire(order=order, keep=keep)  # type: ignore[arg-type]
        own = [name for name in self.whole if name.epoch in self.own]
        own_steps = sorted({name.step for name in own}, reverse=order == "highest")[:keep]
        kept = {max((name for name in own if name.step == step), key=lambda name: name.epoch) for step in own_steps}
        newest = next((name for name in kept if name.step == own_steps[0]), None)
        unseen = not self.chain.store.sink.reads_back and newest in self.same_size
        if newest and (self.whole[newest] or unseen):
            self.whole = {name: whole for name, whole in self.whole.items() if name not in own or name in kept}

    @rule()
    def sweep(self) -> None:
        self.lease.sweep()

    @precondition(lambda self: not self.complete)
    @rule()
    def finish(self) -> None:
        self.lease.complete({"scores": state(0)}, FACTS)
        self.complete = True

    @rule()
    def clear(self) -> None:
        if self.complete:
            self.lease.clear()
            self.whole = {}
        else:
            with pytest.raises(StorageError):
                self.lease.clear()

    @invariant()
    def readers_agree_with_the_dictionary(self) -> None:
        assert self.chain.sealed() == sorted(self.whole)
        usable = sorted((name.step, -name.epoch) for name, whole in self.whole.items() if whole)
        found = self.chain.newest(FACTS, order="lowest")
        assert (found and (found.step, -found.epoch)) == (usable[0] if usable else None)
        if found:
            assert same_bits(found.tensors("rank0"), state(found.step))
        assert (self.chain.completed(FACTS) is not None) == self.complete


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


def test_on_s3_too(moto_s3: S3Server) -> None:
    class OnS3(ChainMachine):
        def __init__(self) -> None:
            super().__init__(Store(moto_s3.bucket_url(), options=moto_s3.options))

    run_state_machine_as_test(OnS3, settings=settings(max_examples=4, stateful_step_count=10, deadline=None))
