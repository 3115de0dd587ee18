"""What every test may rely on: the machine's settings do not leak in, and nothing is skipped where all is required."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

import hypothesis
import pytest

# Before torch, Dagster or Hugging Face are imported, and for the processes that tests start.
for _name in ("DAGSTER_HOME", "MAGIC_PIPELINE_EXPERIMENTS", "PYTHONWARNINGS"):
    os.environ.pop(_name, None)
os.environ.update(
    DAGSTER_DISABLE_TELEMETRY="yes",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    AWS_EC2_METADATA_DISABLED="true",
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


@pytest.fixture
def require_or_skip() -> Callable[[str], NoReturn]:
    """Call it with what is missing: it skips the test, or fails it where MAGIC_REQUIRE_ALL is set, as in CI."""

    def missing(reason: str) -> NoReturn:
        if os.environ.get("MAGIC_REQUIRE_ALL"):
            pytest.fail(f"MAGIC_REQUIRE_ALL is set, but {reason}")
        pytest.skip(reason)

    return missing
