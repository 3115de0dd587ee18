"""Names in Dagster: an experiment's asset keys and partitions, and the query keys that become partitions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import dagster as dg

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.errors import InputError

QUERY, RANK = "query", "rank"
# Jobs are named `{experiment}_{kind}`.
JOB_KINDS = (
    "train", "attribute", "score", "collect", "observe", "retrain", "validate", "remove", "derivative", "smoothness"
)  # fmt: skip
# Queries of one run: enough to share all rematerialisation, few enough to keep the run's page in the UI quick.
QUERIES_PER_RUN = 64
# SQLite takes a limited number of variables in one statement.
_KEYS_AT_ONCE = 200


@dataclass(frozen=True)
class ExperimentAssets:
    """The keys of one experiment's assets, and how they are partitioned."""

    experiment: str
    ranks: int

    @classmethod
    def of(cls, experiment: Experiment) -> ExperimentAssets:
        return cls(experiment.name, experiment.ranks)

    @property
    def training_data(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "training_data"])

    @property
    def queries(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "queries"])

    @property
    def trajectory(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "training_trajectory"])

    @property
    def segments(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "segment_checkpoints"])

    @property
    def scores(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "attribution_scores"])

    @property
    def matrix(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "score_matrix"])

    @property
    def subsets(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "retrained_subsets"])

    @property
    def lds(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "linear_datamodeling_score"])

    @property
    def removal(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "removal_curves"])

    @property
    def smoothness(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "metasmoothness"])

    @property
    def derivative(self) -> dg.AssetKey:
        return dg.AssetKey([self.experiment, "directional_derivative"])

    @property
    def queries_name(self) -> str:
        """The name of the dynamic partitions that hold the query keys."""
        return f"{self.experiment}_queries"

    @property
    def rank_keys(self) -> tuple[str, ...]:
        return tuple(str(rank) for rank in range(self.ranks))

    def by_query(self) -> dg.DynamicPartitionsDefinition:
        return dg.DynamicPartitionsDefinition(name=self.queries_name)

    def by_query_and_rank(self) -> dg.MultiPartitionsDefinition:
        return dg.MultiPartitionsDefinition(
            {QUERY: self.by_query(), RANK: dg.StaticPartitionsDefinition(list(self.rank_keys))}
        )

    def segment_key(self, query_key: str, rank: str) -> dg.MultiPartitionKey:
        return dg.MultiPartitionKey({QUERY: query_key, RANK: rank})


def add_query_keys(instance: dg.DagsterInstance, assets: ExperimentAssets, keys: Iterable[str]) -> list[str]:
    """Make the keys partitions, in this order, where they are not yet. Returns the new ones."""
    known = set(instance.get_dynamic_partitions(assets.queries_name))
    new = [key for key in keys if key not in known]
    for start in range(0, len(new), _KEYS_AT_ONCE):
        instance.add_dynamic_partitions(assets.queries_name, new[start : start + _KEYS_AT_ONCE])
    return new


def contiguous_blocks(order: Sequence[str], chosen: Collection[str], at_most: int) -> Iterator[list[str]]:
    """The chosen keys in runs that are contiguous in `order`, as a range of partitions takes everything between its
    ends.

    >>> list(contiguous_blocks("abcdef", "abdef", 2))
    [['a', 'b'], ['d', 'e'], ['f']]
    """
    block: list[str] = []
    for key in order:
        if block and (key not in chosen or len(block) == at_most):
            yield block
            block = []
        if key in chosen:
            block.append(key)
    if block:
        yield block


def planned_keys(context: dg.AssetExecutionContext) -> Sequence[str]:
    """The partitions that this run is to make.

    Raises:
        InputError: there are none: Dagster calls a run over a reversed range successful although it makes nothing. Or the run was asked
            for what is made from them too: after an asset that reports its partitions by itself Dagster skips that, and calls the run
            successful.
    """
    layer = context.job_def.asset_layer
    skipped = layer.selected_asset_keys & layer.asset_graph.get(context.asset_key).child_keys
    if skipped:
        names = ", ".join(sorted(key.to_user_string() for key in skipped))
        raise InputError(
            f"Dagster would skip {names} in this run; choose it in a run of its own, or launch a backfill over both"
        )
    keys = list(context.partition_keys) if context.has_partition_key or context.has_partition_key_range else []
    if not keys:
        raise InputError("this run covers no partition: the first key of its range has to come before the last")
    return keys
