"""Small JSON objects that carry a digest of their own content, so that an altered one cannot be read.

The text is laid out for people. Reading accepts exactly the bytes that writing would produce from what was read: an
empty, truncated, reformatted or flipped object is damaged, also where JSON itself would not mind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from magic_pipeline.checkpoints.digests import bytes_digest, canonical_json, plain
from magic_pipeline.errors import DamagedObjectError


def document_bytes(content: Mapping[str, Any]) -> bytes:
    """The object's bytes: `{"content": ..., "digest": "xxh3_128:..."}`. Raises InputError, TypeError as `plain`."""
    digest = bytes_digest(canonical_json(content).encode("ascii"))
    document = {"content": plain(content), "digest": digest}
    return (json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def document_content(raw: bytes, name: str) -> dict[str, Any]:
    """The content of the object `name` that has these bytes. Raises DamagedObjectError, saying what was found."""
    if not raw:
        raise DamagedObjectError(f"{name}: expected a JSON object with its digest, found an empty file")
    try:
        document = json.loads(raw)
        content, expected = document["content"], document["digest"]
        found = bytes_digest(canonical_json(content).encode("ascii"))
        whole = document_bytes(content) == raw
    except Exception as error:  # whatever garbage makes the parser raise, the object is damaged
        raise DamagedObjectError(
            f"{name}: expected JSON with its digest, found {len(raw)} other bytes ({type(error).__name__})"
        ) from error
    if found != expected:
        raise DamagedObjectError(f"{name}: expected content of digest {expected}, found {found}")
    if not whole or not isinstance(content, dict):
        raise DamagedObjectError(f"{name}: its digest fits, but its {len(raw)} bytes are not as they were written")
    return content
