"""Durable checkpoints: bytes with digests, commits, leases. Knows no training; importing it does not import torch."""

from __future__ import annotations

from magic_pipeline.checkpoints.audit import Finding
from magic_pipeline.checkpoints.chain import COMPLETE_STEP, Chain, Checkpoint, SealedName
from magic_pipeline.checkpoints.digests import bytes_digest, canonical_json, fingerprint, tensors_digest
from magic_pipeline.checkpoints.holder import Holder, is_gone
from magic_pipeline.checkpoints.lease import Lease
from magic_pipeline.checkpoints.store import Blob, Store

__all__ = [
    "COMPLETE_STEP",
    "Blob",
    "Chain",
    "Checkpoint",
    "Finding",
    "Holder",
    "Lease",
    "SealedName",
    "Store",
    "bytes_digest",
    "canonical_json",
    "fingerprint",
    "is_gone",
    "tensors_digest",
]
