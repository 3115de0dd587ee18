"""deploy/server on a real Postgres and an S3 server: a walk whose worker is killed is tried again, with the same bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.faults.services import FOUND_SECONDS, struck, undisturbed_bits
from tests.servers.postgres import programs, running_postgres
from tests.servers.s3_server import S3Server


@pytest.fixture
def with_postgres(require_or_skip: Callable[[str], NoReturn]) -> None:
    if programs() is None:
        require_or_skip("Postgres is not installed; on Debian: apt-get install postgresql")
    if importlib.util.find_spec("dagster_postgres") is None:
        require_or_skip("dagster-postgres is not installed: the extra `deploy`")


@pytest.mark.usefixtures("with_postgres")
@pytest.mark.timeout(200)
def test_a_killed_worker_is_found_and_its_query_walked_again_with_the_same_bits(
    tmp_path: Path, moto_s3: S3Server
) -> None:
    bits = undisturbed_bits(tmp_path / "undisturbed", queries=1)
    storage = {"storage": moto_s3.bucket_url(), "storage_options": moto_s3.options}
    with struck(tmp_path, storage, queries=1) as running:
        running.train()
        healed = running.walk_and_kill("run worker", 0)
        assert healed.found is not None and healed.found < FOUND_SECONDS
        assert healed.runs == ("FAILURE", "SUCCESS")
        running.finish()
        assert running.wrong(bits) == []


@pytest.mark.usefixtures("with_postgres")
def test_what_postgres_has_committed_survives_the_kill_of_all_its_processes() -> None:
    with running_postgres() as server:
        server.make_database("kept")
        server.kill()
        with pytest.raises(RuntimeError, match="onnect"):
            server.make_database("refused")
        server.start()
        with pytest.raises(RuntimeError, match='"kept" already exists'):
            server.make_database("kept")
