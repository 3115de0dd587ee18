"""Experiments over logical ranks, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InputError, InterruptedWalkError
from tests.attribution.running import TASKS, keys, open_small, relative_error, run, same_bits

RANKS: dict[str, Any] = {"ranks": 3, "processes": 1, "training": {"clip_norm": 0.3, "microbatch_size": 1}}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_any_number_of_ranks_gives_the_scores_of_one(tmp_path: Path, undisturbed: Any, count: int) -> None:
    found = run(open_small(tmp_path, **{**RANKS, "ranks": count}))
    expected = undisturbed(training={"clip_norm": 0.3, "microbatch_size": 1})
    assert relative_error(found, expected) < 1e-9


def test_each_rank_has_a_blob_with_its_pieces_and_a_walk_goes_on_from_them(tmp_path: Path) -> None:
    opened = open_small(tmp_path / "disturbed", **RANKS)
    train(opened)
    steps = iter(range(100))
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened), should_stop=lambda: next(steps) == 4)
    chain = opened.query_chain(opened.queries[0])
    manifest = chain.manifest(chain.sealed()[0])
    assert sorted(manifest.blobs) == ["rank0", "rank1", "rank2"]
    tensors = [manifest.tensors(part) for part in sorted(manifest.blobs)]
    sizes = [sum(t.numel() for n, t in part.items() if n.startswith("params/")) for part in tensors]
    assert sum(sizes) == 39 and max(sizes) == 13
    assert same_bits(run(opened), run(open_small(tmp_path / "undisturbed", **RANKS)))
    assert verify_experiment(opened).findings == ()


def test_a_damaged_blob_of_one_rank_moves_all_of_them_one_checkpoint_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_small(tmp_path / "damaged", **RANKS)
    train(opened)
    steps = iter(range(100))
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened), should_stop=lambda: next(steps) == 7)
    chain = opened.query_chain(opened.queries[0])
    newest = chain.manifest(chain.sealed()[0])
    blob = Path(opened.store.url) / chain.blobs / newest.blobs["rank2"].name
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(bytes(content))
    before = query_statuses(opened)[0].step
    report = walk(opened, keys(opened))
    resumed = report.resumed_from[opened.queries[0].key]
    assert before is not None and resumed is not None and resumed > before
    assert f"{blob.name}: expected digest" in caplog.text
    assert same_bits(run(opened), run(open_small(tmp_path / "undisturbed", **RANKS)))


def test_a_model_with_batch_statistics_is_refused(tmp_path: Path) -> None:
    task = {"type": f"{TASKS}:SmallTask", "middle": "batch_norm"}
    with pytest.raises(
        InputError, match=r"ranks: training changes the model's buffer '1.running_mean' .*take ranks: 1"
    ):
        open_small(tmp_path, task=task, ranks=2)


def test_ranks_are_in_the_fingerprint_and_processes_are_not(tmp_path: Path) -> None:
    one, two = (open_small(tmp_path / str(count), ranks=count).fingerprint for count in (1, 2))
    assert one != two == open_small(tmp_path / "processes", ranks=2, processes=2).fingerprint


def test_a_batch_with_fewer_rows_than_ranks_leaves_the_last_ranks_idle(tmp_path: Path) -> None:
    opened = open_small(tmp_path, ranks=7, processes=1)
    shards = opened.shards(0, None)
    assert [shard.rank for shard in shards] == sorted({shard.rank for shard in shards}) and len(shards) == 4
    assert shards[0].rank == 0
    assert torch.isfinite(run(opened)).all()
