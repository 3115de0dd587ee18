"""The Helm values of deploy/kubernetes, as far as they can be read without a cluster: the Job that dagster-k8s makes of them."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from magic_pipeline.attribution.experiment_settings import AttributionSettings
from magic_pipeline.orchestration.instance import prepare_home
from tests.deploy.deployment import ROOT

VALUES = ROOT / "deploy" / "kubernetes" / "values.yaml"
# As the chart names them for the launcher.
SECTIONS = {
    "containerConfig": "container_config",
    "podSpecConfig": "pod_spec_config",
    "jobSpecConfig": "job_spec_config",
}


@pytest.fixture
def k8s(require_or_skip: Callable[[str], NoReturn]) -> Any:
    if importlib.util.find_spec("dagster_k8s") is None:
        require_or_skip("dagster-k8s is not installed: the extra `deploy`")
    return importlib.import_module("dagster_k8s.job")


@pytest.fixture
def values() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(VALUES.read_text())
    return content


def manifest(k8s: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The Job of a run."""
    deployment = values["dagster-user-deployments"]["deployments"][0]
    given = values["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]
    own = k8s.UserDefinedDagsterK8sConfig.from_dict({SECTIONS[name]: section for name, section in given.items()})
    image = f"{deployment['image']['repository']}:{deployment['image']['tag']}"
    config = k8s.DagsterK8sJobConfig(
        job_image=image,
        dagster_home="/opt/dagster/dagster_home",
        instance_config_map="dagster-instance",
        postgres_password_secret=values["global"]["postgresqlSecretName"],
        env_secrets=[secret["name"] for secret in deployment["envSecrets"]],
    )
    job: dict[str, Any] = k8s.construct_dagster_k8s_job(config, ["dagster"], "a-run", own).to_dict()
    return job


def test_a_run_gets_its_device_its_secrets_by_name_and_time_to_seal(k8s: Any, values: dict[str, Any]) -> None:
    job = manifest(k8s, values)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    # A gang that does not stop within its own grace is ended, and needs a moment to say so.
    own = AttributionSettings.model_fields["stop_grace_seconds"].default
    assert own < pod["termination_grace_period_seconds"] == 330
    assert {one["key"] for one in pod["tolerations"]} == {"nvidia.com/gpu", "cloud.google.com/gke-spot"}
    assert pod["affinity"]["node_affinity"]["preferred_during_scheduling_ignored_during_execution"]
    # Kubernetes starts nothing again by itself: two walks of one run would fight for its lease.
    assert job["spec"]["backoff_limit"] == 0 and pod["restart_policy"] == "Never"
    assert [source["secret_ref"]["name"] for source in container["env_from"]] == ["magic-storage"]
    password = next(one for one in container["env"] if one["name"] == "DAGSTER_PG_PASSWORD")
    assert password["value"] is None and password["value_from"]["secret_key_ref"]["name"] == "magic-postgres"


@pytest.mark.parametrize(
    ("section", "right", "wrong"),
    [
        ("podSpecConfig", "terminationGracePeriodSeconds", "terminationGracePeriod"),
        ("podSpecConfig", "tolerations", "toleration"),
        ("containerConfig", "resources", "resource"),
        ("jobSpecConfig", "backoffLimit", "backofLimit"),
    ],
)
def test_a_misspelt_field_is_refused(k8s: Any, values: dict[str, Any], section: str, right: str, wrong: str) -> None:
    misspelt = copy.deepcopy(values)
    fields = misspelt["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"][section]
    fields[wrong] = fields.pop(right)
    with pytest.raises(Exception, match=wrong):
        manifest(k8s, misspelt)


def test_the_daemon_monitors_and_retries_as_everywhere_and_nothing_is_open_to_the_outside(
    values: dict[str, Any], tmp_path: Path
) -> None:
    prepare_home(tmp_path / "home")
    daemon, ours = values["dagsterDaemon"], yaml.safe_load((tmp_path / "home" / "dagster.yaml").read_text())
    monitoring, retries = ours["run_monitoring"], ours["run_retries"]
    for name, key in (
        ("pollIntervalSeconds", "poll_interval_seconds"),
        ("maxResumeRunAttempts", "max_resume_run_attempts"),
        ("freeSlotsAfterRunEndSeconds", "free_slots_after_run_end_seconds"),
    ):
        assert daemon["runMonitoring"][name] == monitoring[key]
    assert daemon["runRetries"]["maxRetries"] == retries["max_retries"]
    assert values["dagsterWebserver"]["service"]["type"] == "ClusterIP" and not values["ingress"]["enabled"]
