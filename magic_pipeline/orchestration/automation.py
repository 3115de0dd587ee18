"""When Dagster makes scores and their matrix by itself, once its automation sensor is turned on: when their inputs are complete."""

from __future__ import annotations

import dagster as dg


def when_inputs_are_complete(upstream: dg.AssetKey) -> dg.AutomationCondition:  # type: ignore[type-arg] # of partitions or not
    """What is missing, or made from other data than `upstream` has now, once every part of `upstream` is there and none is being made.

    Dagster's own `eager` acts on every new materialization, and finished walks are reported again: here it is the data version that
    counts. `upstream` is the one asset that is read; the observed sources are not waited for.
    """
    read = dg.AssetSelection.assets(upstream)
    condition = dg.AutomationCondition
    changed = condition.any_deps_match(condition.data_version_changed()).allow(read).with_label("read_data_changed")
    absent = condition.any_deps_match(condition.missing()).allow(read).with_label("read_data_missing")
    in_progress = condition.any_deps_match(condition.in_progress()).allow(read).with_label("read_data_in_progress")
    return (
        (condition.newly_missing() | changed).since_last_handled() & ~absent & ~in_progress & ~condition.in_progress()
    ).with_label("when_inputs_are_complete")
