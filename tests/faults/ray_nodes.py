"""deploy/ray: two nodes on loopback, Postgres and an S3 server; one node is lost with all that is on it, and one only for Ray.

`python -m tests.faults.ray_nodes` prints a table: what was killed, after how many seconds Dagster had found it and the walk was done,
and where its runs were. Where only Ray's own process on a node is killed, the walk there goes on while Dagster tries the run again on
the other node: the lease sees to it that only one of them walks. At the end all that `tests.faults.services` asks for must hold, and
every query was walked once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from magic_pipeline.orchestration.instance import open_instance
from magic_pipeline.orchestration.partitions import ExperimentAssets
from tests.deploy.deployment import ROOT, Deployment, deployed, wait_for
from tests.faults.services import HEAD, Struck, environment_of, home_on_postgres, prepare, undisturbed_bits
from tests.faults.whole_run import place
from tests.orchestration.small_experiment import materializations
from tests.servers.postgres import running_postgres
from tests.servers.ray_cluster import RayCluster, running_ray

RAY = ROOT / "deploy" / "ray"
NODES = ("127.0.0.3", "127.0.0.4")
VICTIMS = ("run worker", "node", "raylet")


@dataclass
class StruckCluster(Struck):
    """A deployment whose runs are Ray's jobs."""

    cluster: RayCluster

    def kill(self, victim: str, run: str) -> bool:
        """Whether the run has gone with it, so that Dagster has to find that out: always."""
        if victim == "run worker":
            self.kill_worker(run)
        elif victim == "node":
            self.cluster.kill_node(self.cluster.node_of(run))
        else:
            self.cluster.kill_raylet(self.cluster.node_of(run))
        return True

    def nodes_of_newest(self) -> list[str]:
        """Of the newest walk and of the one that it tries again: where they were executed, the older one first.

        A run that was taken for dead may end well by itself, before its retry has begun: both are waited for.
        """
        wait_for(self._all_have_ended, 120, lambda: str(self.deployment.runs()))
        runs = [one["runId"] for one in self.deployment.runs() if one["jobName"] == "small_attribute"]
        return [self.cluster.node_of(run) for run in reversed(runs[:2])]

    def _all_have_ended(self) -> bool:
        return all(one["status"] in ("SUCCESS", "FAILURE") for one in self.deployment.runs())

    def mend(self) -> None:
        """Starts every node that was lost, and ends what Ray has lost sight of."""
        for address in NODES:
            if not self.cluster.is_alive(address):
                self.cluster.kill_node(address)
                self.cluster.start_worker(address)

    def walked_otherwise(self) -> list[str]:
        """The partitions that were not made exactly once."""
        with open_instance(self.experiment.folder) as instance:
            made = materializations(instance, ExperimentAssets.of(self.experiment).segments)
        times = Counter(partition for partition, _, again in made if not again)
        return [f"{partition} was walked {count} times" for partition, count in times.items() if count != 1]


@contextlib.contextmanager
def struck_cluster(folder: Path, storage: Mapping[str, object], queries: int) -> Iterator[StruckCluster]:
    """Postgres, a Ray cluster of two nodes, and deploy/server's processes on both, running."""
    experiment = prepare(folder / "experiments", storage, queries)
    with running_postgres() as postgres:
        home = home_on_postgres(folder / "home", RAY)
        deployment = Deployment(home, experiment.folder, postgres.environment)
        with running_ray({**deployment.environment, "HOME": str(folder)}, NODES) as cluster:
            deployment.extra = {**postgres.environment, "MAGIC_RAY_ADDRESS": cluster.address}
            with environment_of(deployment), deployed(deployment):
                yield StruckCluster(deployment, experiment, postgres, cluster)


def campaign(folder: Path, storage: Mapping[str, object], tell: Callable[[str], None]) -> list[str]:
    """Kills everything once; gives what was wrong in the end."""
    bits = undisturbed_bits(folder / "undisturbed", len(VICTIMS))
    with struck_cluster(folder, storage, len(VICTIMS)) as running:
        running.train()
        tell(f"{HEAD}, nodes")
        problems = []
        for number, victim in enumerate(VICTIMS):
            healed = running.walk_and_kill(victim, number, outlived=victim == "raylet")
            nodes = running.nodes_of_newest()
            tell(f"{healed}, {' then '.join(nodes)}")
            if victim != "run worker" and len(set(nodes)) != 2:
                problems.append(f"{victim}: the run was not tried again on the other node")
            running.mend()
        running.finish()
        return problems + running.walked_otherwise() + running.wrong(bits)


def main() -> int:
    began = time.monotonic()
    # ignore_cleanup_errors: a killed server may still write its last line.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, place("moto", Path(name)) as where:
        problems = campaign(Path(name), where.new(), functools.partial(print, flush=True))
    end = f"{len(problems)} things are wrong" if problems else "nothing lost"
    print(*problems, f"{end} ({time.monotonic() - began:.0f} s)", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
