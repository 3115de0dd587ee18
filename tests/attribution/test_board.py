"""The board of several processes, each played by a thread with a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from magic_pipeline.attribution.board import OwnBoard, StoreBoard, decided

PATIENCE = timedelta(seconds=20)


@pytest.fixture
def boards() -> Iterator[tuple[StoreBoard, StoreBoard]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    connections = [TCPStore("127.0.0.1", server.port, is_master=False, timeout=PATIENCE) for _ in range(2)]
    yield StoreBoard(connections[0], 0, 2), StoreBoard(connections[1], 1, 2)
    del server  # it serves until here


def test_everybody_hears_everybody_in_the_order_of_the_processes(boards: tuple[StoreBoard, StoreBoard]) -> None:
    with ThreadPoolExecutor() as pool:
        for call in range(3):
            told = list(pool.map(StoreBoard.collect, boards, [[call, True], [call, False]]))
            assert told == [[[call, True], [call, False]]] * 2
        assert list(pool.map(lambda board: decided(board, board.leads), boards)) == [True, True]
    assert OwnBoard().collect("alone") == ["alone"] and OwnBoard().channel("saves").leads


def test_a_thread_that_waits_on_a_channel_keeps_no_other_thread_waiting(boards: tuple[StoreBoard, StoreBoard]) -> None:
    """Process 0 waits in its main thread and process 1 in a background thread, each for the other's other thread."""
    main, saves = boards, [board.channel("saves") for board in boards]
    heard: list[list[str]] = []

    def say(board: StoreBoard, after: threading.Event | None) -> None:
        if after is not None:
            after.wait(5)
        heard.append(board.collect("said"))

    others_wait = threading.Event()
    talks = [(main[0], None), (saves[1], None), (main[1], others_wait), (saves[0], others_wait)]
    threads = [threading.Thread(target=say, args=talk, daemon=True) for talk in talks]
    for thread in threads:
        thread.start()
    threading.Timer(0.5, others_wait.set).start()
    for thread in threads:
        thread.join(10)
    assert heard == [["said", "said"]] * 4
