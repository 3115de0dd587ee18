"""The parts of the report are metadata of the assets that they are about."""

from __future__ import annotations

import dagster as dg
import pytest

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.orchestration.partitions import ExperimentAssets


def newest(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, dg.MetadataValue]:
    [record] = instance.fetch_materializations(key, limit=1).records
    assert record.asset_materialization is not None
    return dict(record.asset_materialization.metadata)


@pytest.mark.parametrize(
    ("asset", "charts", "tables"),
    [
        ("trajectory", ("loss_curve",), ()),
        ("scores", ("plot", "distribution", "scores_by_step"), ("top_examples",)),
        ("matrix", (), ("costs",)),
    ],
)
def test_charts_and_tables_stand_with_their_asset(
    two_finished: Experiment,
    its_instance: dg.DagsterInstance,
    asset: str,
    charts: tuple[str, ...],
    tables: tuple[str, ...],
) -> None:
    metadata = newest(its_instance, getattr(ExperimentAssets.of(two_finished), asset))
    for name in charts:
        assert str(metadata[name].value).startswith("![") and "data:image/png;base64," in str(metadata[name].value)
    for name in tables:
        assert str(metadata[name].value).count("|--") >= 1
