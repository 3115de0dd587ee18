"""What the sensor launches: a pure decision told by a table, and ticks over a real instance and a real store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import DagsterRunStatus

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.queries import partition_key
from magic_pipeline.orchestration import operating
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.instance import GPU_POOL, open_instance
from magic_pipeline.orchestration.operating import opened_once
from magic_pipeline.orchestration.partitions import ExperimentAssets, add_query_keys
from magic_pipeline.orchestration.queries_sensor import Decision, View, decide, runs_at_once, view_of
from magic_pipeline.orchestration.running import run_experiment
from tests.orchestration.small_experiment import materializations, red_partitions

READY = View(partitions=("a", "b", "c", "d"), asked=("a", "b", "c", "d"), trained=True)


def some(*keys: str) -> frozenset[str]:
    return frozenset(keys)


TABLE: dict[str, tuple[View, Decision]] = {
    "nothing is trained": (View((), ("a", "b")), Decision(add=("a", "b"))),
    "all are new": (
        View((), ("a", "b", "c"), trained=True),
        Decision(add=("a", "b", "c"), attribute=(("a", "b"), ("c",))),
    ),
    "one is new": (
        replace(READY, asked=("a", "b", "c", "d", "e"), walked=some(*"abcd"), scored=some(*"abcd"), collected=True),
        Decision(add=("e",), attribute=(("e",),)),
    ),
    "what is in runs is left to them": (
        replace(READY, walking=some("a", "b"), runs={"attribute": 1}),
        Decision(attribute=(("c", "d"),)),
    ),
    "a block has no gaps": (
        replace(READY, walked=some("b"), scored=some("b"), collected=True),
        Decision(attribute=(("a",), ("c", "d"))),
    ),
    "no more than two runs at once": (
        replace(READY, partitions=tuple("abcdefgh"), asked=tuple("abcdefgh")),
        Decision(attribute=(("a", "b"), ("c", "d"))),
    ),
    "with two under way none is added": (replace(READY, walking=some("a", "b"), runs={"attribute": 2}), Decision()),
    "who is held elsewhere is left alone": (replace(READY, held=some("a", "d")), Decision(attribute=(("b", "c"),))),
    "a failure waits for a person": (
        replace(READY, failed=some("c"), walked=some("a", "b"), scored=some("a", "b"), collected=True),
        Decision(attribute=(("d",),)),
    ),
    "walked ones get their scores": (
        replace(READY, walked=some(*"abcd"), scored=some("b")),
        Decision(score=(("a",), ("c", "d"))),
    ),
    "the matrix comes when no scores are under way": (
        replace(READY, walked=some(*"abcd"), scored=some("a", "b"), scoring=some("c", "d"), runs={"score": 2}),
        Decision(),
    ),
    "then the matrix": (replace(READY, walked=some(*"abcd"), scored=some(*"abcd")), Decision(collect=True)),
    "and once": (
        replace(READY, walked=some(*"abcd"), scored=some(*"abcd"), runs={"collect": 1}),
        Decision(),
    ),
    "all is done": (replace(READY, walked=some(*"abcd"), scored=some(*"abcd"), collected=True), Decision()),
    "queries that are asked no more go": (
        replace(READY, asked=("a", "b"), walked=some("a", "b"), scored=some("a", "b"), collected=True),
        Decision(remove=("c", "d")),
    ),
    "but not while a run covers them": (
        replace(READY, asked=("a",), walked=some("a"), scored=some("a"), walking=some("c"), scoring=some("d")),
        Decision(remove=("b",)),
    ),
    "a gap that is removed parts no block": (
        replace(READY, asked=("a", "c", "d")),
        Decision(remove=("b",), attribute=(("a", "c"), ("d",))),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_decision(case: str) -> None:
    view, expected = TABLE[case]
    found = decide(view, block=2)
    assert replace(found, why="") == expected and found.why
    walks = [key for block in found.attribute for key in block]
    assert len(walks) == len(set(walks)) and not set(walks) & (view.walked | view.walking | view.held | view.failed)


QUERIES: list[dict[str, Any]] = [{"id": f"query {n}", "x": [0.1 * n, 1.0 - n], "y": 0.5 * n} for n in range(4)]


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """The small experiment, its queries in a file of two."""
    return load_experiment(write(tmp_path / "experiments", QUERIES[:2]))


def write(folder: Path, queries: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    ask(folder, queries)
    path = folder / "small.yaml"
    path.write_text(
        "name: small\ntask: {type: 'tests.orchestration.asked_task:Asked', examples: 12, features: 2}\nqueries: {file: queries.jsonl}\n"
        "training: {epochs: 2, batch_size: 4, dtype: float64, optimizer: {name: sgd, lr: 0.1}, schedule: {name: constant}}\n"
        "attribution: {segment_steps: 2, threads: 1}\n"
    )
    return path


def ask(folder: Path, queries: list[dict[str, Any]]) -> None:
    (folder / "queries.jsonl").write_text("".join(f"{json.dumps(query)}\n" for query in queries))


@pytest.fixture
def instance(experiment: Experiment) -> Iterator[dg.DagsterInstance]:
    with open_instance(experiment.folder) as opened:
        yield opened


def tick(instance: dg.DagsterInstance, experiment: Experiment) -> list[dg.RunRequest]:
    """One tick, as the daemon makes it; its new partitions are added."""
    repository = build_definitions(experiment.folder).get_repository_def()
    sensor = repository.get_sensor_def("small_queries")
    with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
        data = sensor.evaluate_tick(context)
    for request in data.dynamic_partitions_requests or ():
        add_query_keys(instance, ExperimentAssets.of(experiment), request.partition_keys)
    return list(data.run_requests or ())


def execute(instance: dg.DagsterInstance, experiment: Experiment, request: dg.RunRequest) -> None:
    operating._last_opened.clear()  # a run of the daemon's has a process of its own, which reads the file anew
    job = build_definitions(experiment.folder).get_repository_def().get_job(str(request.job_name))
    assert job.execute_in_process(instance=instance, tags=dict(request.tags)).success


def test_ticks_attribute_every_query_once_as_they_come(instance: dg.DagsterInstance, experiment: Experiment) -> None:
    assets = ExperimentAssets.of(experiment)
    assert tick(instance, experiment) == []
    assert instance.get_dynamic_partitions(assets.queries_name) == [partition_key(q["id"]) for q in QUERIES[:2]]
    train = build_definitions(experiment.folder).get_repository_def().get_job("small_train")
    assert train.execute_in_process(instance=instance).success
    launched = []
    for wave in (QUERIES[:2], QUERIES):
        ask(experiment.folder, wave)
        while requests := tick(instance, experiment):
            for request in requests:
                launched.append(request.job_name)
                execute(instance, experiment, request)
    assert launched == ["small_attribute", "small_score", "small_collect"] * 2
    keys = [partition_key(query["id"]) for query in QUERIES]
    made = [(partition, again) for partition, _, again in materializations(instance, assets.segments)]
    assert made == [(f"{key}|0", False) for key in keys]
    assert [partition for partition, _, _ in materializations(instance, assets.scores)] == keys
    assert red_partitions(instance, assets.segments) == set()
    assert decide(view_of(instance, experiment)).runs == 0
    # A run of everything finds nothing to do either.
    assert run_experiment(instance, experiment).runs == []


def test_running_ones_failed_ones_and_those_to_be_retried_keep_their_queries(
    instance: dg.DagsterInstance, experiment: Experiment
) -> None:
    train = build_definitions(experiment.folder).get_repository_def().get_job("small_train")
    assert train.execute_in_process(instance=instance).success
    [request] = tick(instance, experiment)
    job = build_definitions(experiment.folder).get_repository_def().get_job("small_attribute")
    run = instance.create_run_for_job(job_def=job, tags=dict(request.tags), status=DagsterRunStatus.STARTED)
    keys = frozenset(partition_key(query["id"]) for query in QUERIES[:2])
    assert tick(instance, experiment) == [] and view_of(instance, experiment).walking == keys
    instance.report_run_failed(run, "gone")
    instance.add_run_tags(run.run_id, {"dagster/will_retry": "true"})
    assert tick(instance, experiment) == [] and view_of(instance, experiment).walking == keys
    # The tag stays when the retry is launched, which then counts by itself.
    instance.add_run_tags(run.run_id, {"dagster/auto_retry_run_id": "another"})
    assert view_of(instance, experiment).runs["attribute"] == 0
    instance.add_run_tags(run.run_id, {"dagster/will_retry": "false"})
    view = view_of(instance, experiment)
    assert tick(instance, experiment) == [] and (view.walking, view.failed) == (frozenset(), keys)
    assert "2 failed and wait for a person" in decide(view).why
    execute(instance, experiment, request)  # as that person does
    assert [one.job_name for one in tick(instance, experiment)] == ["small_score"]


def test_a_query_that_a_live_process_holds_is_not_launched(
    instance: dg.DagsterInstance, experiment: Experiment
) -> None:
    train = build_definitions(experiment.folder).get_repository_def().get_job("small_train")
    assert train.execute_in_process(instance=instance).success
    opened = opened_once(experiment)
    folder = opened.layout.query(opened.queries[0].key, opened.queries[0].digest)
    code = (
        "import sys; from magic_pipeline.checkpoints import Chain, Store\n"
        "lease = Chain(Store(sys.argv[1]), sys.argv[2], writers=sys.argv[3]).take(); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, opened.store.url, folder, opened.layout.writers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        [request] = tick(instance, experiment)
        assert request.tags["dagster/asset_partition_range_start"] == f"{opened.queries[1].key}|0"
        other.kill()


def test_a_wrong_queries_file_ends_the_tick_with_its_line(instance: dg.DagsterInstance, experiment: Experiment) -> None:
    (experiment.folder / "queries.jsonl").write_text('{"id": "one"}\n{"id": 2}\n')
    with pytest.raises(Exception, match="line 2: expected id to be a non-empty string, found 2"):
        tick(instance, experiment)


def test_the_nightly_schedule_walks_every_partition_in_blocks(
    instance: dg.DagsterInstance, experiment: Experiment
) -> None:
    schedule = build_definitions(experiment.folder).get_repository_def().get_schedule_def("small_nightly")
    with dg.build_schedule_context(instance) as context:
        assert "no partitions yet" in str(schedule.evaluate_tick(context).skip_message)
    add_query_keys(instance, ExperimentAssets.of(experiment), [f"q{n:03d}" for n in range(70)])
    night = datetime(2026, 1, 2, 2, tzinfo=UTC)
    with dg.build_schedule_context(instance, scheduled_execution_time=night) as context:
        requests = schedule.evaluate_tick(context).run_requests or ()
    ends = [
        (r.tags["dagster/asset_partition_range_start"], r.tags["dagster/asset_partition_range_end"]) for r in requests
    ]
    assert ends == [("q000|0", "q063|0"), ("q064|0", "q069|0")]


def test_a_tick_imports_no_torch(experiment: Experiment) -> None:
    code = (
        "import sys; from pathlib import Path; from magic_pipeline.attribution.experiment import load_experiment\n"
        "from magic_pipeline.orchestration.instance import GPU_POOL, open_instance\n"
        "from magic_pipeline.orchestration.queries_sensor import decide, view_of\n"
        "experiment = load_experiment(Path(sys.argv[1]))\n"
        "with open_instance(experiment.folder) as instance:\n"
        "    assert decide(view_of(instance, experiment)).add\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(experiment.path)], check=True)


def test_as_many_runs_as_the_pool_of_devices_admits_and_one_that_waits(tmp_path: Path) -> None:
    with open_instance(tmp_path) as instance:
        assert runs_at_once(instance) == 2
        instance.event_log_storage.set_concurrency_slots(GPU_POOL, 3)
        assert runs_at_once(instance) == 4
    pools = {"concurrency": {"pools": {"granularity": "run", "default_limit": 8}}}
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides=pools) as instance:
        instance.event_log_storage.delete_concurrency_limit(GPU_POOL)
        assert runs_at_once(instance) == 9
