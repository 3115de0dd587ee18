"""Logical ranks: any number of them gives the reference's scores, and any number of processes the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from magic_pipeline.metagradient.numerics import exact_numerics
from magic_pipeline.metagradient.ranks import Ranks
from tests.metagradient import gang_of_tests, running
from tests.reference.unrolled import unrolled_scores

ROOT = Path(__file__).parents[2]
# (family, optimizer, clip norm, micro-batches a step): with fewer of them than ranks, some ranks have none.
CASES = [
    ("gpt2-tied", "adamw", "0.5", 4),
    ("mlp", "adamw", "None", 2),
    ("mlp", "sgd-nesterov-decay", "0.5", 4),
]


def in_processes(folder: Path, case: tuple[str, str, str, int], ranks: int, processes: int) -> list[dict[str, Any]]:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.metagradient.gang_of_tests", str(folder / "store")]
    rest = [str(processes), str(ranks), *map(str, case), str(folder)]
    running = [subprocess.Popen([*command, str(process), *rest], cwd=ROOT) for process in range(processes)]
    assert [process.wait(120) for process in running] == [0] * processes
    return [torch.load(folder / f"{process}.pt") for process in range(processes)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_scores_equal_the_unrolled_reference(case: tuple[str, str, str, int], count: int) -> None:
    problem = gang_of_tests.problem_of(*case)
    _, scores, _ = gang_of_tests.walk(problem, Ranks(count), chunk=2)
    assert running.relative_error(scores.sum(0), unrolled_scores(problem)) < 1e-9


@pytest.mark.parametrize(("case", "processes"), [(CASES[0], 2), (CASES[1], 2), (CASES[2], 4)], ids=str)
def test_any_number_of_processes_gives_the_same_bits_and_holds_its_share_of_the_slots(
    tmp_path: Path, case: tuple[str, str, str, int], processes: int
) -> None:
    with exact_numerics(1):
        state, scores, slots = gang_of_tests.walk(gang_of_tests.problem_of(*case), Ranks(4), chunk=2)
    found = in_processes(tmp_path / "gang", case, 4, processes)
    for process, one in enumerate(found):
        assert all(torch.equal(one["params"][name], value) for name, value in state.params.items())
        assert torch.equal(one["scores"], scores[process::processes])
    assert sum(int(one["slots"]) for one in found) == slots
    assert max(int(one["slots"]) for one in found) < 1.1 * slots / processes


def test_pieces_put_together_are_the_whole(tmp_path: Path) -> None:
    whole = {"a": torch.randn(3, 5), "b": torch.randn(()), "empty": torch.empty(0), "c": torch.randn(2, 2, 2)}
    for count in (1, 2, 5, 30, 40):
        ranks = Ranks(count)
        joined = ranks.join(ranks.cut(whole), whole)
        assert all(torch.equal(joined[name], tensor) for name, tensor in whole.items())
        lanes = {n: torch.stack([t, 2 * t, 3 * t]) for n, t in ranks.cut(whole).items()}
        of_lanes = ranks.join(lanes, whole)
        assert all(torch.equal(of_lanes[name][2], 3 * tensor) for name, tensor in whole.items())


def test_processes_that_do_not_divide_the_ranks_are_refused() -> None:
    class Three:
        processes, process = 3, 0

    with pytest.raises(ValueError, match="3 processes cannot share 4 ranks"):
        Ranks(4, Three())  # type: ignore[arg-type]
