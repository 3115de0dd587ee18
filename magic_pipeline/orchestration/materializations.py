"""Materializations as events of their own, with the versions that Dagster's staleness needs, and what the event log
holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._core.definitions.data_version import (
    CODE_VERSION_TAG,
    DATA_VERSION_IS_USER_PROVIDED_TAG,
    DATA_VERSION_TAG,
    NULL_EVENT_POINTER,
    extract_data_version_from_entry,
    get_input_data_version_tag,
    get_input_event_pointer_tag,
)
from dagster._core.events import DagsterEventType


@dataclass(frozen=True)
class Input:
    """What a partition was made from: an upstream asset, its partition if it has any, and its data version."""

    key: dg.AssetKey
    version: str
    partition: str | None = None


def log_partition(
    context: dg.AssetExecutionContext,
    partition: str,
    *,
    version: str,
    made_from: Input,
    metadata: Mapping[str, Any],
    reported_again: bool,
) -> None:
    """Report one partition of the op's asset as materialized, at once: it stays so if the run fails later.

    `reported_again` marks a partition that was finished before; it carries the same data version.
    """
    key = context.asset_key
    code_version = context.assets_def.code_versions_by_key[key]
    tags = {
        DATA_VERSION_TAG: version,
        DATA_VERSION_IS_USER_PROVIDED_TAG: "true",
        get_input_data_version_tag(made_from.key): made_from.version,
        get_input_event_pointer_tag(made_from.key): _pointer(context.instance, made_from),
    }
    if code_version is not None:
        tags[CODE_VERSION_TAG] = code_version
    facts = {**metadata, "reported_again": reported_again}
    context.log_event(dg.AssetMaterialization(key, partition=partition, tags=tags, metadata=facts))


def _pointer(instance: dg.DagsterInstance, made_from: Input) -> str:
    """The upstream event that carries the version which was used, as Dagster's staleness looks for newer ones after
    it."""
    record = instance.get_latest_data_version_record(made_from.key, False, made_from.partition)
    if record is None:
        return NULL_EVENT_POINTER
    found = extract_data_version_from_entry(record.event_log_entry)
    return str(record.storage_id) if found is not None and found.value == made_from.version else NULL_EVENT_POINTER


def recorded_version(instance: dg.DagsterInstance, key: dg.AssetKey) -> str | None:
    """The data version of the asset's latest materialization in the event log."""
    record = instance.get_latest_data_version_record(key, False)
    version = None if record is None else extract_data_version_from_entry(record.event_log_entry)
    return None if version is None else version.value


def recorded_versions(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, str]:
    """The data version of each partition's latest materialization in the event log."""
    tags = instance.event_log_storage.get_latest_tags_by_partition(
        key, DagsterEventType.ASSET_MATERIALIZATION, [DATA_VERSION_TAG]
    )
    return {partition: found[DATA_VERSION_TAG] for partition, found in tags.items() if DATA_VERSION_TAG in found}
