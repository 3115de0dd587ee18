"""Which change makes which partitions stale, and no others: a table, over a real instance and a finished experiment.

Whoever changes something back finds everything fresh again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
import torch
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.orchestration import operating
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.inputs_assets import files_stamp
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from magic_pipeline.orchestration.running import run_experiment

FILE = """
# the points of a line
name: stale
task: {type: "points_task:Points", data: points.npz}
training:
  {seed: 1, epochs: 2, batch_size: 4, dtype: float64, optimizer: {name: sgd, lr: 0.1}, schedule: {name: constant}}
queries: {split: test, count: 2}
attribution: {segment_steps: 2, threads: 1, chunk: 2}
"""
TASK = """
from magic_pipeline.tasks.linear_regression import LinearRegression

class Points(LinearRegression):
    version = "1"

    @property
    def measurements(self):
        return {"plain": self.example_losses}
"""
FIRST, SECOND = {"segments 0", "scores 0"}, {"segments 1", "scores 1"}
WALKS = FIRST | SECOND | {"matrix"}
ALL = WALKS | {"trajectory"}
Change = Callable[[Path, pytest.MonkeyPatch], None]


def edit(old: str, new: str, file: str = "stale.yaml") -> Change:
    def change(folder: Path, patch: pytest.MonkeyPatch) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return change


def move(array: str, row: int, by: float = 0.5) -> Change:
    def change(folder: Path, patch: pytest.MonkeyPatch) -> None:
        with np.load(folder / "points.npz") as found:
            arrays = {name: found[name].copy() for name in found.files}
        arrays[array][row] += by
        np.savez(folder / "points.npz", **arrays)

    return change


def more_queries(folder: Path, patch: pytest.MonkeyPatch) -> None:
    edit("count: 2", "count: 3")(folder, patch)


def newer_torch(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.99.1")


def other_task_version(folder: Path, patch: pytest.MonkeyPatch) -> None:
    import points_task  # type: ignore[import-not-found] # beside the experiment

    patch.setattr(points_task.Points, "version", "2")


def talkative(folder: Path, patch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("magic_pipeline")
    patch.setattr(logger, "level", logging.DEBUG)


TABLE: dict[str, tuple[Change, set[str]]] = {
    "learning rate": (edit("lr: 0.1", "lr: 0.2"), ALL),
    "seed": (edit("seed: 1", "seed: 2"), ALL),
    "epochs": (edit("epochs: 2", "epochs: 3"), ALL),
    "optimizer": (edit("name: sgd, lr", "name: sgd, momentum: 0.9, lr"), ALL),
    "ranks": (edit("name: stale", "name: stale\nranks: 2"), ALL),
    "task version": (other_task_version, ALL),
    "one training document": (move("x", 3), ALL),
    "one training document's target": (move("y", 3), ALL),
    "one query's content": (move("query_x", 1), SECOND | {"matrix"}),
    "another query's content": (move("query_y", 0), FIRST | {"matrix"}),
    "one query more": (more_queries, {"matrix"}),
    "points that nobody asks about": (move("query_x", 2), set()),
    "what queries measure": (edit("count: 2", "count: 2, measurement: plain"), WALKS),
    "queries walked together": (edit("chunk: 2", "chunk: 1, query_batch: 1"), set()),
    "memory, threads and segments": (edit("threads: 1", "threads: 2, memory_budget: 1GiB, save_every: 1"), set()),
    "device": (edit("name: stale", "name: stale\ndevice: cpu"), set()),
    "what is validated": (edit("name: stale", "name: stale\nvalidation: {smoothness: {}}"), set()),
    "a comment in the experiment file": (edit("# the points", "# some points"), set()),
    "a comment in the task file": (edit("class Points", "# one comment more\nclass Points", "points_task.py"), set()),
    "log level": (talkative, set()),
    "library patch version": (newer_torch, set()),
    "nothing": (lambda folder, patch: None, set()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of the experiment is made."""
    made = tmp_path_factory.mktemp("stale") / "experiments"
    made.mkdir()
    draw = np.random.default_rng(0)
    shapes = {"x": (12, 2), "y": (12,), "query_x": (4, 2), "query_y": (4,)}
    arrays: dict[str, Any] = {name: draw.normal(size=shape) for name, shape in shapes.items()}
    np.savez(made / "points.npz", **arrays)
    (made / "stale.yaml").write_text(FILE)
    (made / "points_task.py").write_text(TASK)
    with open_instance(made) as instance:
        assert len(run_experiment(instance, load_experiment(made / "stale.yaml")).runs) == 4
    return made


@pytest.fixture
def instance(folder: Path) -> Iterator[dg.DagsterInstance]:
    with open_instance(folder) as opened:
        yield opened


def keys(experiment: Experiment) -> list[str]:
    from magic_pipeline.attribution.queries import partition_key

    return [partition_key(f"query-{number}") for number in range(2)]


def observe(instance: dg.DagsterInstance, folder: Path) -> None:
    """As the sensor has it done: in a process of its own, which opens everything anew."""
    operating._last_opened.clear()
    job = build_definitions(folder).get_repository_def().get_job("stale_observe")
    assert job.execute_in_process(instance=instance).success


def stale(instance: dg.DagsterInstance, folder: Path) -> set[str]:
    experiment = load_experiment(folder / "stale.yaml")
    assets = ExperimentAssets.of(experiment)
    graph = build_definitions(folder).get_repository_def().asset_graph
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    asked: dict[str, tuple[dg.AssetKey, str | None]] = {
        "trajectory": (assets.trajectory, None),
        "matrix": (assets.matrix, None),
    }
    for number, key in enumerate(keys(experiment)):
        asked[f"segments {number}"] = (assets.segments, assets.segment_key(key, "0"))
        asked[f"scores {number}"] = (assets.scores, key)
    found = {name: resolver.get_status(*where) for name, where in asked.items()}
    assert set(found.values()) <= {StaleStatus.FRESH, StaleStatus.STALE}
    return {name for name, status in found.items() if status == StaleStatus.STALE}


@pytest.mark.parametrize("case", TABLE)
def test_what_a_change_makes_stale(
    case: str, instance: dg.DagsterInstance, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected = TABLE[case]
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert stale(instance, folder) == set()
    try:
        with monkeypatch.context() as patch:
            change(folder, patch)
            observe(instance, folder)
            assert stale(instance, folder) == expected
    finally:
        for path, content in before.items():
            path.write_bytes(content)
        observe(instance, folder)
    assert stale(instance, folder) == set()


def test_a_run_after_a_change_leaves_everything_fresh_and_so_does_going_back(
    instance: dg.DagsterInstance, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = folder / "stale.yaml", (folder / "stale.yaml").read_text()
    for change, runs in ((edit("lr: 0.1", "lr: 0.3"), 4), (edit("lr: 0.3", "lr: 0.1"), 4)):
        change(folder, monkeypatch)
        assert stale(instance, folder) == ALL
        operating._last_opened.clear()
        assert len(run_experiment(instance, load_experiment(path)).runs) == runs
        assert stale(instance, folder) == set()
    assert path.read_text() == before
    # Going back made nothing anew: all of it is still in the store.
    for key in (ExperimentAssets("stale", 1).trajectory, ExperimentAssets("stale", 1).matrix):
        [record] = instance.fetch_materializations(key, limit=1).records
        assert record.asset_materialization is not None
        assert record.asset_materialization.metadata["reported_again"].value is True


def test_a_code_version_alone_is_brought_up_to_date_without_computing(
    instance: dg.DagsterInstance, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The split into micro-batches changes no number of this model, which Dagster's processes cannot know.
    before = (folder / "stale.yaml").read_text()
    for old, new in (("batch_size: 4", "batch_size: 4, microbatch_size: 2"), (", microbatch_size: 2", "")):
        edit(old, new)(folder, monkeypatch)
        assert stale(instance, folder) == ALL
        operating._last_opened.clear()
        outcome = run_experiment(instance, load_experiment(folder / "stale.yaml"))
        assert [asset for asset, _, _ in outcome.runs] == [
            "training_trajectory", "segment_checkpoints", "attribution_scores", "score_matrix",
        ]  # fmt: skip
        assert stale(instance, folder) == set()
    assert (folder / "stale.yaml").read_text() == before


def test_the_sensor_asks_for_a_look_when_a_file_was_changed(instance: dg.DagsterInstance, folder: Path) -> None:
    repository = build_definitions(folder).get_repository_def()
    sensor = repository.get_sensor_def("stale_inputs")
    cursor = None
    for change, expected in ((None, 1), (None, 0), ("points_task.py", 1), (None, 0), ("points.npz", 1), (None, 0)):
        if change is not None:
            content = (folder / change).read_bytes()
            (folder / change).write_bytes(content)
        with dg.build_sensor_context(instance=instance, repository_def=repository, cursor=cursor) as context:
            data = sensor.evaluate_tick(context)
        cursor = data.cursor
        assert len(data.run_requests or ()) == expected
        assert all(request.job_name in (None, "stale_observe") for request in data.run_requests or ())
        # Dagster launches a key only once, and a file may be put back as it was, its time too.
        assert all(request.run_key is None for request in data.run_requests or ())
    assert sensor.default_status == dg.DefaultSensorStatus.STOPPED


def test_the_stamp_follows_folders_and_survives_what_is_no_file(tmp_path: Path) -> None:
    from magic_pipeline.attribution.experiment import parse_experiment

    (tmp_path / "pictures").mkdir()
    task = {"type": "image_classifier", "data": "pictures", "model": "hub/name", "odd": "a\0b", "more": ["s3://b/c"]}
    experiment = parse_experiment({"name": "a", "task": task}, folder=tmp_path)
    stamps = [files_stamp(experiment)]
    (tmp_path / "pictures" / "one.png").write_bytes(b"1")
    stamps.append(files_stamp(experiment))
    (tmp_path / "pictures" / "one.png").write_bytes(b"12")
    stamps.append(files_stamp(experiment))
    assert len(set(stamps)) == 3 and files_stamp(experiment) == stamps[-1]
