"""Who gets a signal while a walk is on, and what Dagster makes of each error."""

from __future__ import annotations

import signal
import threading

import dagster as dg
import pytest
from dagster._core.errors import DagsterExecutionInterruptedError

from magic_pipeline.errors import (
    CredentialsError,
    DamagedObjectError,
    HeldError,
    InputError,
    InterruptedWalkError,
    LeaseLostError,
    MagicError,
    NonFiniteError,
    StorageError,
    StorageFullError,
    TrajectoryMismatchError,
)
from magic_pipeline.orchestration.failures import RETRIES, classified_failures
from magic_pipeline.orchestration.interrupts import deferred_interrupts, is_interrupt


def raised_by(error: BaseException, retry_number: int = 0) -> BaseException:
    """What an op lets out when its work raises the error."""

    class Context:
        pass

    context = Context()
    context.retry_number = retry_number  # type: ignore[attr-defined]
    try:
        with classified_failures(context):  # type: ignore[arg-type]
            raise error
    except BaseException as caught:  # noqa: BLE001 - whatever it is
        return caught


def interrupted_walk(number: signal.Signals, seen: list[bool], *, stops: bool) -> None:
    """A walk that gets the signal twice, and then stops or has just ended."""
    with deferred_interrupts() as should_stop:
        seen.append(should_stop())
        signal.raise_signal(number)
        signal.raise_signal(number)  # a second one does not break the sealing either
        seen.append(should_stop())
        if stops:
            raise InterruptedWalkError("stopped")


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_only_sets_the_flag_and_is_raised_at_the_end(number: signal.Signals, stops: bool) -> None:
    former, seen = signal.getsignal(number), list[bool]()
    with pytest.raises(DagsterExecutionInterruptedError):
        interrupted_walk(number, seen, stops=stops)
    assert seen == [False, True]
    assert signal.getsignal(number) is former


def test_another_threads_work_leaves_the_handlers_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with deferred_interrupts() as should_stop:
            seen.extend([signal.getsignal(signal.SIGTERM), should_stop()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM), False]


def test_an_interrupt_inside_a_save_is_found_in_the_context() -> None:
    try:
        try:
            raise DagsterExecutionInterruptedError
        except BaseException:  # noqa: BLE001 - as torch.save does
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904
    except RuntimeError as error:
        caught = error
    assert is_interrupt(caught)
    assert isinstance(raised_by(caught), DagsterExecutionInterruptedError)
    assert not is_interrupt(RuntimeError("unexpected pos 64 vs 0"))


@pytest.mark.parametrize(
    "error",
    [
        InputError("wrong"),
        NonFiniteError("NaN at step 3"),
        TrajectoryMismatchError("off"),
        MagicError("not ready"),
        StorageFullError("no space left"),
        CredentialsError("expired"),
        ValueError("a mistake"),
    ],
)
def test_what_would_come_again_is_not_tried_again(error: Exception) -> None:
    failure = raised_by(error)
    assert isinstance(failure, dg.Failure)
    assert failure.allow_retries is False
    assert str(error) in str(failure.description)
    assert failure.metadata["kind"].value == ("input" if isinstance(error, InputError) else "other")


@pytest.mark.parametrize(
    "error",
    [
        StorageError("refused"),
        DamagedObjectError("flipped"),
        OSError(28, "disk is full"),
        LeaseLostError("taken over"),
        HeldError("held", holder={}),
    ],
)
def test_what_may_pass_is_tried_again_and_not_for_ever(error: Exception) -> None:
    assert isinstance(raised_by(error), dg.RetryRequested)
    assert isinstance(raised_by(error, retry_number=RETRIES), dg.Failure)


def test_dagsters_own_requests_pass_through() -> None:
    for error in (dg.Failure("f"), dg.RetryRequested(), DagsterExecutionInterruptedError()):
        assert raised_by(error) is error
