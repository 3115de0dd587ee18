"""Query ids and the keys that stand for them in Dagster's partitions and in storage paths. No torch.

A query's id is the user's own: any non-empty string. Its partition key is made of characters that Dagster, shells, file
systems and object stores take as they are. Reports and exports show the id, never the key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from magic_pipeline.errors import InputError

_READABLE = 24
_HASHED = 8


def partition_key(query_id: str) -> str:
    """Up to 24 letters, digits, `_` and `-` of the id, then `-` and 8 hex digits of the id's SHA-256.

    The same id always gives the same key. Ids that differ only in case, or only in characters that keys cannot hold,
    differ in the hexadecimal part, so a file system that ignores case keeps their keys apart.

    >>> partition_key("digit 7, row 12")
    'digit_7_row_12-a8d15ceb'
    >>> partition_key("a|b"), partition_key("a/b")
    ('a_b-0eab8a0a', 'a_b-c14cddc0')

    Raises:
        InputError: the id is not a string, is empty, or is not valid Unicode.
    """
    if not isinstance(query_id, str):
        raise InputError(f"a query id must be a string, found {query_id!r} ({type(query_id).__name__})")
    if not query_id:
        raise InputError("a query id is empty")
    try:
        digest = hashlib.sha256(query_id.encode("utf-8")).hexdigest()
    except UnicodeEncodeError:
        raise InputError(f"the query id {_shown(query_id)} is not valid Unicode (a lone surrogate)") from None
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", query_id)[:_READABLE].strip("_-")
    return f"{readable or 'query'}-{digest[:_HASHED]}"


def partition_keys(query_ids: Iterable[str]) -> dict[str, str]:
    """id -> partition key, in the order given.

    Raises:
        InputError: there is no id, an id is empty or appears twice, or two ids have keys that a file system ignoring
            case would merge.
    """
    keys: dict[str, str] = {}
    positions: dict[str, int] = {}
    owners: dict[str, str] = {}
    for position, query_id in enumerate(query_ids, start=1):
        try:
            key = partition_key(query_id)
        except InputError as error:
            raise InputError(f"query {position}: {error}") from None
        if query_id in keys:
            raise InputError(
                f"the query id {_shown(query_id)} is given twice: queries {positions[query_id]} and {position}"
            )
        other = owners.setdefault(key.casefold(), query_id)
        if other != query_id:
            both = f"{_shown(other)} and {_shown(query_id)}"
            raise InputError(f"the query ids {both} have the same partition key {key}: change one of them")
        keys[query_id], positions[query_id] = key, position
    if not keys:
        raise InputError("there are no queries")
    return keys


def _shown(query_id: str) -> str:
    """The id as one line of at most 80 characters."""
    text = ascii(query_id) if not query_id.isprintable() else repr(query_id)
    return text if len(text) <= 80 else text[:76] + "...'"
