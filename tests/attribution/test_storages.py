"""The same experiment on every kind of storage: the same bits, also when it is stopped in the middle and goes on elsewhere."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.attribution.observing import CheckpointSealed
from magic_pipeline.attribution.status import query_statuses
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InterruptedWalkError
from tests.attribution.running import keys, open_small, run, same_bits
from tests.servers.faulty import faulty
from tests.servers.s3_server import S3Server


@pytest.fixture(params=["memory", "moto", "seaweedfs"])
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "memory":
        return {"storage": f"memory://{uuid.uuid4().hex}"}
    server: S3Server = request.getfixturevalue({"moto": "moto_s3"}.get(request.param, request.param))
    return {"storage": server.bucket_url(), "storage_options": dict(server.options)}


def test_the_scores_are_those_of_a_local_disk_to_the_bit(
    tmp_path: Path, storage: dict[str, Any], undisturbed: Any
) -> None:
    opened = open_small(tmp_path, **storage)
    train(opened)
    steps = iter(range(100))
    with pytest.raises(InterruptedWalkError):
        walk(opened, keys(opened), should_stop=lambda: next(steps) == 4)
    assert {query.step for query in query_statuses(opened)} == {3}
    again = open_small(tmp_path, **storage)
    assert same_bits(run(again), undisturbed())
    assert verify_experiment(again).findings == ()
    assert again.store.list(again.layout.writers) == []


def test_endpoint_and_credentials_may_come_from_the_environment(
    tmp_path: Path, moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto_s3.environment.items():
        monkeypatch.setenv(name, value)
    train(open_small(tmp_path, storage=moto_s3.bucket_url()))


def test_an_outage_in_the_middle_of_the_walk_costs_time_and_nothing_else(
    tmp_path: Path, moto_s3: S3Server, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty(moto_s3.endpoint_url) as proxy:
        opened = open_small(
            tmp_path, storage=moto_s3.bucket_url(), storage_options=moto_s3.behind(proxy.endpoint_url).options
        )
        train(opened)
        down: list[threading.Thread] = []

        def observe(event: object) -> None:
            if isinstance(event, CheckpointSealed) and not down:
                down.append(proxy.down_for(2))

        found = run(opened, observe=observe)
        down[0].join()
    assert same_bits(found, undisturbed())
    assert "trying again in" in caplog.text
    assert moto_s3.secret not in caplog.text
