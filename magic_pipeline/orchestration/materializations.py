"""Materializations as events of their own, with the versions that Dagster's staleness needs, and what the event log
holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """What a partition was made from: an upstream asset, its partition if it has any, and its data version; `observed` of a source."""

    key: dg.AssetKey
    version: str
    partition: str | None = None
    observed: bool = False


def log_partitions(
    context: dg.AssetExecutionContext,
    partitions: Sequence[str],
    *,
    version: str,
    made_from: Sequence[Input],
    metadata: Mapping[str, Any],
    reported_again: bool,
) -> None:
    """Report partitions of the op's asset, all of one version, as materialized, at once: they stay so if the run fails later.

    `reported_again` marks partitions that were finished before; they carry the same data version.
    """
    key = context.asset_key
    code_version = context.assets_def.code_versions_by_key[key]
    tags = {
        DATA_VERSION_TAG: version,
        DATA_VERSION_IS_USER_PROVIDED_TAG: "true",
    }
    for one in made_from:
        tags[get_input_data_version_tag(one.key)] = one.version
        tags[get_input_event_pointer_tag(one.key)] = _pointer(context.instance, one)
    if code_version is not None:
        tags[CODE_VERSION_TAG] = code_version
    facts = {**metadata, "reported_again": reported_again}
    # Looking up what they were made from takes as long as an event does: once for all of them.
    for partition in partitions:
        context.log_event(dg.AssetMaterialization(key, partition=partition, tags=tags, metadata=facts))


def _pointer(instance: dg.DagsterInstance, made_from: Input) -> str:
    """The upstream event that carries the version which was used, as Dagster's staleness looks for newer ones after
    it."""
    record = instance.get_latest_data_version_record(made_from.key, made_from.observed, made_from.partition)
    if record is None:
        return NULL_EVENT_POINTER
    found = extract_data_version_from_entry(record.event_log_entry)
    return str(record.storage_id) if found is not None and found.value == made_from.version else NULL_EVENT_POINTER


def log_observation(
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
    version: str,
    *,
    partition: str | None = None,
    metadata: Mapping[str, Any],
) -> None:
    """Report that a source, or a partition of it, was seen in this version."""
    tags = {DATA_VERSION_TAG: version, DATA_VERSION_IS_USER_PROVIDED_TAG: "true"}
    context.log_event(dg.AssetObservation(key, partition=partition, tags=tags, metadata=metadata))


def read_inputs_again(context: dg.AssetExecutionContext) -> None:
    """After observing sources in an op whose output Dagster records itself: it took note of its inputs before the op began."""
    context.op_execution_context.get_step_execution_context().fetch_external_input_asset_version_info()


def recorded_version(instance: dg.DagsterInstance, key: dg.AssetKey, code: str | None = None) -> str | None:
    """The data version of the asset's latest materialization in the event log; None where that was made by another code version
    than `code`, if one is given."""
    record = instance.get_latest_data_version_record(key, False)
    if record is None or (code is not None and _code_of(record) != code):
        return None
    version = extract_data_version_from_entry(record.event_log_entry)
    return None if version is None else version.value


def recorded_versions(instance: dg.DagsterInstance, key: dg.AssetKey, code: str | None = None) -> dict[str, str]:
    """The data version of each partition's latest materialization in the event log; none where some were made by another code version
    than `code`, if one is given.

    Dagster's index has no code versions, and a thousand events are too much to read. So the oldest and the newest are looked at: code
    changes at one time for all.
    """
    found = _latest_versions(instance, key, DagsterEventType.ASSET_MATERIALIZATION)
    if code is None or not found:
        return found
    storage = instance.event_log_storage
    ids = storage.get_latest_storage_id_by_partition(key, DagsterEventType.ASSET_MATERIALIZATION).values()
    ends = dg.AssetRecordsFilter(asset_key=key, storage_ids=[min(ids), max(ids)])
    records = instance.fetch_materializations(ends, limit=2).records
    return found if all(_code_of(record) == code for record in records) else {}


def _code_of(record: dg.EventLogRecord) -> str | None:
    event = record.event_log_entry.asset_materialization
    return None if event is None or event.tags is None else event.tags.get(CODE_VERSION_TAG)


def observed_version(instance: dg.DagsterInstance, key: dg.AssetKey) -> str | None:
    """The version in which a source without partitions was seen last."""
    record = instance.get_latest_data_version_record(key, True)
    version = None if record is None else extract_data_version_from_entry(record.event_log_entry)
    return None if version is None else version.value


def observed_versions(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, str]:
    """The version in which each partition of a source was seen last."""
    return _latest_versions(instance, key, DagsterEventType.ASSET_OBSERVATION)


def _latest_versions(instance: dg.DagsterInstance, key: dg.AssetKey, kind: DagsterEventType) -> dict[str, str]:
    tags = instance.event_log_storage.get_latest_tags_by_partition(key, kind, [DATA_VERSION_TAG])
    return {partition: found[DATA_VERSION_TAG] for partition, found in tags.items() if DATA_VERSION_TAG in found}
