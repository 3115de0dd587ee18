"""A queries file that others write to a bucket: walked from there, looked at by the sensors, and missed by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from magic_pipeline.attribution.experiment import Experiment, load_experiment
from magic_pipeline.attribution.queries import partition_key
from magic_pipeline.attribution.queries_file import local_queries_file
from magic_pipeline.errors import InputError
from magic_pipeline.orchestration import operating
from magic_pipeline.orchestration.inputs_assets import files_stamp
from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.queries_sensor import decide, view_of
from magic_pipeline.orchestration.running import run_experiment
from tests.orchestration.test_queries_sensor import QUERIES, write
from tests.servers.s3_server import S3Server


def put(server: S3Server, url: str, queries: list[dict[str, Any]]) -> None:
    body = "".join(f"{json.dumps(query)}\n" for query in queries).encode()
    server.client().put_object(Bucket=server.bucket, Key=url.removeprefix(f"s3://{server.bucket}/"), Body=body)


def in_bucket(folder: Path, server: S3Server, url: str) -> Experiment:
    path = write(folder, QUERIES[:1])
    (folder / "queries.jsonl").unlink()
    content = yaml.safe_load(path.read_text())
    content |= {"queries": {"file": f"{url}/ask/queries.jsonl"}, "storage": url}
    content["storage_options"] = server.options
    path.write_text(yaml.safe_dump(content))
    return load_experiment(path)


def test_a_folder_that_cannot_be_written_needs_no_copy_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path / "experiments", QUERIES[:1])
    queries = (path.parent / "queries.jsonl").rename(tmp_path / "queries.jsonl")
    path.write_text(path.read_text().replace("file: queries.jsonl", f"file: 'file://{queries}'"))
    # As a volume that is mounted read-only, also for who may write everywhere.
    (path.parent / ".magic").write_text("")
    copy = local_queries_file(load_experiment(path))
    assert copy is not None and copy.read_bytes() == queries.read_bytes()
    assert copy.parent.stat().st_mode & 0o077 == 0 and local_queries_file(load_experiment(path)) == copy


def test_queries_from_a_bucket_are_walked_as_they_come(tmp_path: Path, moto_s3: S3Server) -> None:
    url = moto_s3.bucket_url()
    experiment = in_bucket(tmp_path / "experiments", moto_s3, url)
    put(moto_s3, f"{url}/ask/queries.jsonl", QUERIES[:2])
    with open_instance(experiment.folder) as instance:
        assert [asset for asset, _, _ in run_experiment(instance, experiment).runs][:2] == [
            "training_trajectory", "segment_checkpoints",
        ]  # fmt: skip
        stamp = files_stamp(experiment)
        assert files_stamp(experiment) == stamp and decide(view_of(instance, experiment)).runs == 0
        put(moto_s3, f"{url}/ask/queries.jsonl", QUERIES[1:3])
        assert files_stamp(experiment) != stamp
        decision = decide(view_of(instance, experiment))
        old, new = partition_key(QUERIES[0]["id"]), partition_key(QUERIES[2]["id"])
        assert (decision.add, decision.remove, decision.attribute) == ((new,), (old,), ((new,),))
        operating._last_opened.clear()
        run_experiment(instance, experiment)
        assert set(instance.get_dynamic_partitions("small_queries")) == {partition_key(q["id"]) for q in QUERIES[1:3]}
        [record] = instance.fetch_materializations(dg.AssetKey(["small", "score_matrix"]), limit=1).records
        assert record.asset_materialization is not None
        assert record.asset_materialization.metadata["queries"].value == 2


def test_what_is_wrong_with_it_is_named(tmp_path: Path, moto_s3: S3Server) -> None:
    url = moto_s3.bucket_url()
    experiment = in_bucket(tmp_path / "experiments", moto_s3, url)
    with pytest.raises(InputError, match=rf"{url}/ask/queries\.jsonl: queries\.file: there is no such object"):
        local_queries_file(experiment)
    put(moto_s3, f"{url}/ask/queries.jsonl", [{"id": ""}])
    with pytest.raises(InputError, match=r"queries\.jsonl: line 1: expected id to be a non-empty string"):
        view_of(dg.DagsterInstance.ephemeral(), experiment)
