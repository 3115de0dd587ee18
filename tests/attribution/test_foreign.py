"""State of another query, another learning rate or another trajectory is named and never used; one writer at a time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.scores import read_scores
from magic_pipeline.attribution.status import holder_of, query_statuses, stored_status
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import HeldError, InterruptedWalkError, MagicError
from tests.attribution.running import keys, open_small, relative_error, run, same_bits, stop_after

Undisturbed = Callable[..., Tensor]
ROOT = Path(__file__).parent.parent.parent
ADAMW: dict[str, Any] = {"name": "adamw", "betas": [0.9, 0.99], "eps_root": 1e-8}


def query_folder(opened: OpenExperiment, position: int) -> Path:
    query = opened.queries[position]
    return Path(opened.store.url) / opened.layout.query(query.key, query.digest)


def foreign(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "it is of other work" in record.getMessage()]


def test_another_querys_checkpoints_are_never_used(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened)[:1], should_stop=stop_after(4))
    shutil.copytree(query_folder(opened, 0), query_folder(opened, 1))
    report = walk(opened, keys(opened)[1:])
    assert report.resumed_from == dict.fromkeys(keys(opened)[1:])
    assert any("query: expected" in message for message in foreign(caplog))
    assert any("is not in its cohort" in message for message in foreign(caplog))
    # Walked one by one, so in calls of another width.
    assert relative_error(run(opened), undisturbed()) < 1e-12


def test_another_querys_finished_walk_is_never_used(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_small(trained_folder)
    walk(opened, keys(opened)[:1])
    shutil.copytree(query_folder(opened, 0), query_folder(opened, 1))
    assert [query.complete for query in query_statuses(opened)] == [True, False, False]
    assert foreign(caplog)
    walk(opened, keys(opened))
    assert relative_error(run(opened), undisturbed()) < 1e-12


def test_another_learning_rates_training_is_never_used(
    trained_folder: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    faster = open_small(trained_folder, training={"optimizer": ADAMW | {"lr": 0.06}})
    train(faster)
    opened = open_small(trained_folder)
    assert faster.fingerprint != opened.fingerprint
    mine, theirs = (Path(one.store.url) / one.layout.trajectory for one in (opened, faster))
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    assert train(opened).resumed_from == 0
    assert any("training: expected" in message for message in foreign(caplog))
    assert same_bits(run(opened), undisturbed())


def test_a_changed_learning_rate_begins_again_and_leaves_the_old_scores_readable(
    trained_folder: Path, undisturbed: Undisturbed
) -> None:
    before = run(open_small(trained_folder))
    faster = open_small(trained_folder, training={"optimizer": ADAMW | {"lr": 0.06}})
    assert not any(query.complete for query in query_statuses(faster))
    assert not same_bits(run(faster), before)
    assert len(stored_status(faster.experiment)) == 2
    old = open_small(trained_folder)
    for position, key in enumerate(keys(old)):
        assert (read_scores(old, key).scores == before[:, position].numpy()).all()


HOLD = """
import sys, time
from pathlib import Path
from tests.attribution.running import keys, open_small
opened = open_small(Path(sys.argv[1]))
chain = opened.trajectory_chain if sys.argv[2] == "trajectory" else opened.query_chain(opened.queries[0])
chain.take()
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Callable[[Path, str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(folder), what]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_a_live_process_holds_is_left_to_it_and_taken_over_once_it_is_killed(
    trained_folder: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    holding: Callable[[Path, str], subprocess.Popen[str]],
) -> None:
    walker = holding(trained_folder, "query")
    opened = open_small(trained_folder)
    with pytest.raises(HeldError, match=f"process {walker.pid}") as caught:
        walk(opened, keys(opened)[::-1])
    assert caught.value.holder["pid"] == walker.pid
    assert (holder_of(opened, keys(opened)[0]) or {})["pid"] == walker.pid
    assert [query.sealed for query in query_statuses(opened)] == [0, 0, 0]
    # The queries that it asked for besides are free again.
    assert walk(opened, keys(opened)[1:2]).resumed_from == {keys(opened)[1]: None}
    walker.send_signal(signal.SIGKILL)
    walker.wait()
    assert holder_of(opened, keys(opened)[0]) is None
    walk(opened, keys(opened))
    assert all(query.complete for query in query_statuses(opened))


def test_training_that_a_live_process_holds_is_left_to_it(
    tmp_path: Path, holding: Callable[[Path, str], subprocess.Popen[str]]
) -> None:
    trainer = holding(tmp_path, "trajectory")
    opened = open_small(tmp_path)
    with pytest.raises(HeldError, match=f"process {trainer.pid}"):
        train(opened)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert train(opened).resumed_from == 0


def test_scores_of_an_unfinished_walk_are_refused(trained_folder: Path) -> None:
    opened = open_small(trained_folder)
    with pytest.raises(MagicError, match="query 'first': its walk is not finished; materialize segment_checkpoints"):
        read_scores(opened, keys(opened)[0])
