"""Writing while compute goes on: never two at a time, and no error is lost."""

from __future__ import annotations

import threading
import time

import pytest

from magic_pipeline.checkpoints.background import Background
from magic_pipeline.errors import StorageError


def fail() -> int:
    raise StorageError("the disk is gone")


def test_work_is_done_meanwhile_and_its_result_comes_once() -> None:
    go_on = threading.Event()

    def work() -> int:
        go_on.wait(5)
        return 7

    with Background[int]() as background:
        background.start(work)
        assert background.finished() == []
        go_on.set()
        assert background.wait() == [7]
        assert background.wait() == background.finished() == []


def test_two_pieces_of_work_never_run_at_once() -> None:
    with Background[int]() as background:
        background.start(lambda: 1)
        with pytest.raises(RuntimeError, match="not waited for"):
            background.start(lambda: 2)


def test_an_error_comes_with_the_next_save() -> None:
    with Background[int]() as background:
        background.start(fail)
        with pytest.raises(StorageError, match="the disk is gone"):
            background.wait()
        background.start(lambda: 2)
        assert background.wait() == [2]


def test_an_error_comes_as_soon_as_it_is_asked_for() -> None:
    def ask(background: Background[int]) -> None:
        for _ in range(500):
            background.finished()
            time.sleep(0.01)

    with Background[int]() as background:
        background.start(fail)
        with pytest.raises(StorageError, match="the disk is gone"):
            ask(background)


def test_an_error_comes_at_the_end_at_the_latest() -> None:
    with pytest.raises(StorageError, match="the disk is gone"), Background[int]() as background:
        background.start(fail)


def test_the_writer_is_waited_for_when_the_run_fails_and_the_runs_error_is_the_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = []

    def work() -> int:
        time.sleep(0.3)
        ended.append(True)
        return fail()

    def run() -> None:
        with Background[int]() as background:
            background.start(work)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert ended and "a save in the background failed too: the disk is gone" in caplog.text
