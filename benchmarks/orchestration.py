"""What Dagster costs with many queries: pages, ticks and reruns, and what a run, a query and a segment take beyond the walk.

    python benchmarks/orchestration.py [--queries 1000] [--ranks 8] [--storage sqlite postgres] [--repeats 3]

A linear regression of 3 steps is trained, walked and scored for all queries by the plain API. Then, for each of Dagster's storages (a
real Postgres is started on loopback, with deploy/server/dagster.yaml; it needs the `deploy` extra), in an instance that is new:
`magic-pipeline run` reports all of it, a materialization a partition, and everything is measured on that (without pictures, as where
the extra `reports` is not installed: drawing takes longer than all else). Pages are what the browser asks for, over HTTP from a real
`magic-pipeline ui`. What Dagster adds to a walk is the time of a run as `run` executes it, in this process, less that of the same walk
by the plain API.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.gang import walk_together
from magic_pipeline.attribution.opening import OpenExperiment, open_experiment
from magic_pipeline.attribution.scores import write_score_matrix, write_scores
from magic_pipeline.attribution.training import train
from magic_pipeline.orchestration.building import build_definitions
from magic_pipeline.orchestration.headless import EXPERIMENTS_VARIABLE, execute_asset
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets, add_query_keys

ROOT = Path(__file__).parent.parent
EXPERIMENT = """
name: {name}
storage: {storage}
ranks: {ranks}
processes: 1
task: {{type: linear_regression, examples: {examples}, features: 2, query_count: {queries}}}
training: {{epochs: 1, batch_size: 8, dtype: float64, optimizer: {{name: sgd, lr: 0.1}}, schedule: {{name: constant}}}}
queries: {{split: test, count: {queries}}}
attribution: {{segment_steps: 1, threads: 1, chunk: 1, query_batch: {queries}}}
"""
LOADED = """
import sys, time
began = time.perf_counter()
from magic_pipeline.definitions import defs
repository = defs().get_repository_def()
seconds = time.perf_counter() - began
assert len(repository.asset_graph.get_all_asset_keys()) > 3
assert "torch" not in sys.modules, "loading the definitions imports torch"
print(seconds)
"""
# No pictures: what is measured is Dagster's books, and drawing for a thousand queries takes ten minutes.
REPORTED = """
import sys
sys.modules["matplotlib"] = None
from magic_pipeline.cli import main
sys.exit(main(["run", sys.argv[1], "--show", "0"]))
"""
# What the UI's pages send: PartitionHealthQuery as it is, and of AssetViewDefinitionQuery and the lineage beside it what costs.
PARTITION_PAGE = """
query PartitionHealthQuery($assetKey: AssetKeyInput!) {
  assetNodeOrError(assetKey: $assetKey) {
    ... on AssetNode {
      id
      partitionKeysByDimension { name type partitionKeys }
      assetPartitionStatuses {
        ... on TimePartitionStatuses { ranges { status startTime endTime startKey endKey } }
        ... on DefaultPartitionStatuses { materializedPartitions materializingPartitions failedPartitions }
        ... on MultiPartitionStatuses {
          primaryDimensionName
          ranges {
            primaryDimStartKey primaryDimEndKey primaryDimStartTime primaryDimEndTime
            secondaryDim {
              ... on TimePartitionStatuses { ranges { status startTime endTime startKey endKey } }
              ... on DefaultPartitionStatuses { materializedPartitions materializingPartitions failedPartitions }
            }
          }
        }
      }
    }
  }
}
"""
ASSET_PAGE = """
query AssetPage($assetKey: AssetKeyInput!) {
  assetOrError(assetKey: $assetKey) {
    ... on Asset {
      id
      key { path }
      hasDefinitionOrRecord
      assetMaterializations(limit: 1) { timestamp runId metadataEntries { label } }
      definition {
        id groupName isExecutable isPartitioned pools opVersion opNames jobNames description
        partitionDefinition { description dimensionTypes { type dynamicPartitionsDefinitionName } }
        partitionKeysByDimension { name }
        backfillPolicy { description }
        repository { id name location { id name } }
        dependencyKeys { path }
        dependedByKeys { path }
        partitionStats { numMaterialized numMaterializing numPartitions numFailed }
        staleStatus
        staleCauses { reason category }
        targetingInstigators { ... on Sensor { id name } ... on Schedule { id name } }
      }
      assetEventHistory(limit: 100, eventTypeSelectors: [MATERIALIZATION, OBSERVATION, FAILED_TO_MATERIALIZE]) {
        results { ... on MaterializationEvent { runId partition timestamp metadataEntries { label } } }
      }
    }
  }
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--storage", choices=("sqlite", "postgres"), nargs="+", default=["sqlite", "postgres"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(
        f"{options.queries} queries x {options.ranks} ranks, Dagster {dg.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPUs; medians of {options.repeats}"
    )
    with tempfile.TemporaryDirectory(prefix="magic-orchestration-") as name:
        folder = Path(name)
        opened = open_written(folder / "experiments", "many", ranks=options.ranks, steps=3, queries=options.queries)
        print(f"trained, walked and scored by the plain API in {seconds_of(lambda: finish(opened)):.1f} s", flush=True)
        found = {storage: measured_on(storage, folder, opened, options) for storage in options.storage}
    print_table(found)


def open_written(folder: Path, name: str, *, ranks: int, steps: int, queries: int) -> OpenExperiment:
    """An experiment in a file of its own: as many segments as steps."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    examples, storage = 8 * steps, folder.parent / "stores" / name
    path.write_text(EXPERIMENT.format(name=name, storage=storage, ranks=ranks, examples=examples, queries=queries))
    return open_experiment(load_experiment(path))


def finish(opened: OpenExperiment) -> None:
    keys = [query.key for query in opened.queries]
    train(opened)
    walk_together(opened, keys)
    for key in keys:
        write_scores(opened, key)
    write_score_matrix(opened)


def measured_on(storage: str, folder: Path, opened: OpenExperiment, options: argparse.Namespace) -> dict[str, float]:
    """Seconds (milliseconds where the name says so) by what was measured."""
    experiments, repeats = opened.experiment.folder, options.repeats
    with dagster_home(storage, folder), environment({EXPERIMENTS_VARIABLE: str(experiments)}):
        found = {"definitions": median(float(python("-c", LOADED)) for _ in range(repeats))}
        with open_instance(experiments) as instance:
            found["tick that adds all queries"] = tick_seconds(instance, opened.experiment)
        began = time.perf_counter()
        python("-c", REPORTED, str(opened.experiment.path))
        found["run that reports all queries"] = time.perf_counter() - began
        with open_instance(experiments) as instance:
            check_reported(instance, opened.experiment)
            found["tick"] = median(tick_seconds(instance, opened.experiment) for _ in range(repeats))
        found["run with nothing to do"] = median(idle_run_seconds(opened.experiment) for _ in range(repeats))
        found |= page_seconds(experiments, folder / f"{storage}.log", opened.experiment, repeats)
        with open_instance(experiments) as instance:
            found |= overhead(instance, folder / storage, options.ranks, repeats)
    print(f"{storage}: measured", flush=True)
    return found


@contextlib.contextmanager
def dagster_home(storage: str, folder: Path) -> Iterator[None]:
    """A new instance, as `magic-pipeline ui` or as deploy/server makes it."""
    home = folder / f"{storage}_home"
    with contextlib.ExitStack() as ends:
        if storage == "postgres":
            sys.path.insert(0, str(ROOT))
            from tests.servers.postgres import running_postgres

            server = ends.enter_context(running_postgres())
            ends.enter_context(environment(server.environment))
            home.mkdir()
            shutil.copy(ROOT / "deploy" / "server" / "dagster.yaml", home)
        ends.enter_context(environment({"DAGSTER_HOME": str(home)}))
        yield


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def tick_seconds(instance: dg.DagsterInstance, experiment: Experiment) -> float:
    """One tick of the queries sensor: its decision, and the new partitions, added as the daemon adds them."""
    repository = build_definitions(experiment.folder).get_repository_def()
    sensor = repository.get_sensor_def(f"{experiment.name}_queries")
    began = time.perf_counter()
    with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
        data = sensor.evaluate_tick(context)
    for request in data.dynamic_partitions_requests or ():
        instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
    return time.perf_counter() - began


def check_reported(instance: dg.DagsterInstance, experiment: Experiment) -> None:
    assets = ExperimentAssets.of(experiment)
    queries = len(instance.get_dynamic_partitions(assets.queries_name))
    for key, expected in ((assets.segments, queries * assets.ranks), (assets.scores, queries)):
        found = len(instance.get_materialized_partitions(key))
        assert found == expected, f"{key.to_user_string()}: {found} of {expected} partitions are materialized"


def idle_run_seconds(experiment: Experiment) -> float:
    """The whole command, from the start of its process to its end."""
    began = time.perf_counter()
    said = python("-m", "magic_pipeline.cli", "run", str(experiment.path), "--show", "0")
    seconds = time.perf_counter() - began
    assert "nothing was run" in said, said
    return seconds


def page_seconds(folder: Path, log: Path, experiment: Experiment, repeats: int) -> dict[str, float]:
    """The first answer of a webserver that has just started, and the median of later ones."""
    sys.path.insert(0, str(ROOT))
    from tests.ui.serving import ask, served

    key = {"assetKey": {"path": ExperimentAssets.of(experiment).segments.path}}
    found: dict[str, float] = {}
    with served(folder, log) as address:
        for name, query in (("partition page", PARTITION_PAGE), ("asset page", ASSET_PAGE)):
            times = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                answer = ask(address, query, key)
                times.append(time.perf_counter() - began)
            found |= {f"{name}, first": times[0], name: median(times[1:])}
            check_page(answer, experiment)
    return found


def check_page(answer: Mapping[str, Any], experiment: Experiment) -> None:
    """That the page shows every partition as materialized."""
    if "assetNodeOrError" in answer:
        node = answer["assetNodeOrError"]
        sizes = {one["name"]: len(one["partitionKeys"]) for one in node["partitionKeysByDimension"]}
        assert sizes["rank"] == experiment.ranks, sizes
        ranges = node["assetPartitionStatuses"]["ranges"]
        assert all(len(one["secondaryDim"]["materializedPartitions"]) for one in ranges) and ranges, ranges
    else:
        stats = answer["assetOrError"]["definition"]["partitionStats"]
        assert stats["numMaterialized"] == stats["numPartitions"] > 0, stats


def overhead(instance: dg.DagsterInstance, folder: Path, ranks: int, repeats: int) -> dict[str, float]:
    """What a run in Dagster takes beyond the plain walk: in all, for each further query, and for each further segment."""
    few, many = 3, 103
    sizes = {"run": (few, 1), "segment": (many, 1), "query": (few, 21)}
    extra: dict[str, list[float]] = {name: [] for name in sizes}
    walked_beyond(instance, folder, ranks, few, 1)  # what is imported and compiled by the first is not counted
    for _ in range(repeats):
        for name, (segments, queries) in sizes.items():
            extra[name].append(walked_beyond(instance, folder, ranks, segments, queries))
    run = median(extra["run"])
    return {
        "Dagster a run": run,
        "Dagster a segment, ms": 1000 * (median(extra["segment"]) - run) / (many - few),
        f"Dagster a query ({ranks} partitions), ms": 1000 * (median(extra["query"]) - run) / 20,
    }


def walked_beyond(instance: dg.DagsterInstance, folder: Path, ranks: int, segments: int, queries: int) -> float:
    """Seconds of a Dagster run over an experiment of its own, less those of the same walk in a store of its own."""
    number = len(list(folder.glob("*"))) if folder.exists() else 0
    place = folder / str(number)
    in_dagster, plain = (
        open_written(place / kind / "experiments", f"{folder.name}_{number}_{kind}", ranks=ranks, steps=segments, queries=queries)
        for kind in ("dagster", "plain")
    )  # fmt: skip
    for opened in (in_dagster, plain):
        train(opened)
    keys = [query.key for query in in_dagster.queries]
    assets = ExperimentAssets.of(in_dagster.experiment)
    add_query_keys(instance, assets, keys)
    ends = assets.segment_key(keys[0], assets.rank_keys[0]), assets.segment_key(keys[-1], assets.rank_keys[-1])
    repository = build_definitions(in_dagster.experiment.folder).get_repository_def()
    alone = seconds_of(lambda: walk_together(plain, keys))
    began = time.perf_counter()
    run = execute_asset(instance, repository, assets.segments, ends)
    together = time.perf_counter() - began
    assert run.is_success
    return together - alone


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def python(*arguments: str) -> str:
    """What a fresh Python process prints; from the root, as the code location's module is found there.

    Raises:
        RuntimeError: it failed.
    """
    ended = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(arguments[:4])}: {ended.stderr[-2000:]}")
    return ended.stdout


def print_table(found: Mapping[str, Mapping[str, float]]) -> None:
    names: Sequence[str] = list(next(iter(found.values())))
    print(f"\n{'seconds':40}" + "".join(f"{storage:>10}" for storage in found))
    for name in names:
        print(f"{name:40}" + "".join(f"{measured[name]:10.2f}" for measured in found.values()))


if __name__ == "__main__":
    main()
