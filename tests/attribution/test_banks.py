"""Leave-out banks: right by an ordinary loop; what is damaged is retrained, what is finished is not, and training itself never is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magic_pipeline.attribution import bank_plan, ledger, retraining
from magic_pipeline.attribution.bank_results import base_measurements
from magic_pipeline.attribution.linear_datamodeling import LinearDatamodelingScore
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.retraining import open_bank
from magic_pipeline.attribution.scores import write_score_matrix
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.validation import finished_subsets, retrain_subsets, subset_banks, write_lds
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.errors import InterruptedWalkError
from tests.attribution.running import keys, open_small, run, stop_after, trained

LDS: dict[str, Any] = {"subsets": 8, "drop_fraction": 0.25}
Results = dict[str, tuple[str, dict[str, float]]]


def with_bank(folder: Path, /, *, lds: dict[str, Any] | None = None, **changes: Any) -> OpenExperiment:
    return open_small(folder, validation={"lds": LDS | (lds or {})}, **changes)


def results(opened: OpenExperiment) -> Results:
    """Label -> the retrained model's digest and its measurements."""
    return {label: (run.digest, dict(run.result.measurements)) for label, run in finished_subsets(opened).items()}


def begun(opened: OpenExperiment) -> list[tuple[str, int]]:
    """(first label, step) of every block of retrainings that the ledger says was begun."""
    entries = ledger.entries(opened.store, opened.layout)
    return [(e["retrainings"][0], e["start"]) for e in entries if e["work"] == "retrain"]


@pytest.fixture
def blocks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks, whatever would be the fastest."""
    monkeypatch.setattr(bank_plan, "_WIDTHS", (2,))
    monkeypatch.setattr(bank_plan, "_seconds", lambda opened, bank, width, microbatch_size: 1.0 / width)


def ordinary_measurements(opened: OpenExperiment, dropped: set[int]) -> list[float]:
    """The queries' losses after an ordinary loop with torch.optim in which these examples weigh nothing."""
    torch.manual_seed(0)
    task: Any = opened.task
    model = task.build_model().double()
    initial = opened.initial_state.params
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for batch in opened.order:
        optimizer.zero_grad()
        weights = torch.tensor([float(index not in dropped) for index in batch], dtype=torch.float64)
        losses = losses_of(model, task.collate([opened.dataset[index] for index in batch]))
        (weights * losses).sum().div(len(batch)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return [float(losses_of(model, task.collate(query.query.examples)).mean()) for query in opened.queries]


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


@pytest.mark.parametrize("batchable", [True, False], ids=["batched", "one by one"])
def test_each_retraining_is_an_ordinary_training_without_the_dropped_examples(
    tmp_path: Path, batchable: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not batchable:

        def refuse(*arguments: Any) -> Any:
            raise RuntimeError("vmap: this model keeps its hands on its parameters")

        monkeypatch.setattr(bank_plan, "batched_gradient", refuse)
    training = {"optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.9}, "schedule": {"name": "constant"}}
    opened = with_bank(tmp_path, training=training | {"batch_size": 3})
    train(opened)
    retrain_subsets(opened)
    [bank] = subset_banks(opened)
    assert open_bank(opened, bank).plan.batched is batchable
    assert batchable or "the model cannot be batched over its parameters: vmap: this model keeps" in caplog.text
    base = base_measurements(open_bank(opened, bank))
    assert list(base.values()) == pytest.approx(ordinary_measurements(opened, set()), rel=1e-12)
    for label, found in finished_subsets(opened).items():
        dropped = set(bank.run(label).rows.tolist())
        assert len(dropped) == 3
        expected = ordinary_measurements(opened, dropped)
        assert list(found.result.measurements.values()) == pytest.approx(expected, rel=1e-12)
        assert max(abs(a - b) for a, b in zip(expected, base.values(), strict=True)) > 1e-3


@pytest.mark.usefixtures("blocks_of_two")
def test_a_bank_that_is_stopped_goes_on_and_never_repeats_a_finished_block(tmp_path: Path) -> None:
    whole = with_bank(tmp_path / "whole")
    train(whole)
    retrain_subsets(whole)
    opened = with_bank(tmp_path / "stopped")
    train(opened)
    for asked in (9, 4, 8):
        with pytest.raises(InterruptedWalkError, match="a rerun goes on from there"):
            retrain_subsets(opened, should_stop=stop_after(asked))
    retrain_subsets(opened)
    retrain_subsets(opened)
    assert results(opened) == results(whole) and len(results(opened)) == 8
    # Six steps a block; each time it goes on at the very step where it was stopped.
    stopped = [("0.25-002", 3), ("0.25-004", 1), ("0.25-006", 3)]
    assert sorted(begun(opened)) == sorted([(f"0.25-{first:03d}", 0) for first in (0, 2, 4, 6)] + stopped)
    assert verify_experiment(opened).findings == ()


@pytest.mark.usefixtures("blocks_of_two")
def test_a_damaged_result_is_named_missing_and_retrained_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = with_bank(tmp_path)
    run(opened)
    write_score_matrix(opened)
    retrain_subsets(opened)
    expected, [bank] = results(opened), subset_banks(opened)
    whole = table(opened)
    of = open_bank(opened, bank)
    chain = of.chain(of.blocks[1])
    blob = chain.manifest(chain.completions()[0]).blobs["measurements"].name
    file = Path(opened.store.url) / chain.blobs / blob
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))

    assert any(blob in f.object and f.problem.startswith("damaged") for f in verify_experiment(opened).findings)
    assert results(opened).keys() == expected.keys() - {"0.25-002", "0.25-003"}
    partial = table(opened)
    assert partial.coverage == "6 of 8 subsets" and partial.is_partial and not whole.is_partial
    assert blob in caplog.text and "expected digest" in caplog.text
    before = begun(opened)
    retrain_subsets(opened)
    assert begun(opened)[len(before) :] == [("0.25-002", 0)]
    assert results(opened) == expected and table(opened) == whole
    assert len(trained(opened)) == len(set(trained(opened)))


def table(opened: OpenExperiment) -> LinearDatamodelingScore:
    [content] = write_lds(opened).content
    return LinearDatamodelingScore.from_dict(content)


def test_a_later_query_is_measured_on_the_kept_models_without_any_retraining(tmp_path: Path) -> None:
    def asking(folder: Path, count: int) -> OpenExperiment:
        task = {"type": "linear_regression", "examples": 12, "features": 2}
        return with_bank(folder, task=task, queries={"split": "test", "count": count})

    opened = asking(tmp_path / "shared", 2)
    train(opened)
    retrain_subsets(opened)
    before, digests = begun(opened), {label: digest for label, (digest, _) in results(opened).items()}
    more = asking(tmp_path / "shared", 3)
    assert more.fingerprint == opened.fingerprint and len(more.queries) == 3
    retrain_subsets(more)
    assert begun(more) == before
    alone = asking(tmp_path / "alone", 3)
    train(alone)
    retrain_subsets(alone)
    found, expected = results(more), results(alone)
    assert {label: digest for label, (digest, _) in found.items()} == digests
    for label, (_, measurements) in found.items():
        assert measurements.keys() == set(keys(more))
        assert measurements == pytest.approx(expected[label][1], rel=1e-12)


@pytest.mark.parametrize("change", [{"drop_fraction": 0.5}, {"subsets": 9}, {"seed": 1}], ids=lambda c: next(iter(c)))
def test_other_subsets_make_another_bank_and_never_train_the_model_again(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    opened = with_bank(tmp_path)
    train(opened)
    retrain_subsets(opened)
    steps, first = trained(opened), results(opened)
    other = with_bank(tmp_path, lds=change)
    assert other.fingerprint == opened.fingerprint
    assert results(other) == {}
    retrain_subsets(other)
    assert trained(other) == steps
    assert len(results(other)) == (LDS | change)["subsets"]
    assert results(opened) == first


def test_a_long_block_is_sealed_inside_and_goes_on_from_there_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retraining, "SEAL_SECONDS", 0.0)
    whole = with_bank(tmp_path / "whole")
    train(whole)
    retrain_subsets(whole)
    opened = with_bank(tmp_path / "crashed")
    train(opened)
    with pytest.raises(ZeroDivisionError):
        retrain_subsets(opened, should_stop=crash_after(5))
    retrain_subsets(opened)
    assert begun(opened) == [("0.25-000", 0), ("0.25-000", 4)]
    found, expected = results(opened), results(whole)
    for label in expected:
        assert found[label][1] == pytest.approx(expected[label][1], rel=1e-12)


def crash_after(n: int) -> Callable[[], bool]:
    asked = iter(range(n))

    def stop() -> bool:
        if next(asked, None) is None:
            raise ZeroDivisionError
        return False

    return stop
