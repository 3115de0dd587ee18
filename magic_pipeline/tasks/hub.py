"""The model hub, asked once whether it can be reached: without a network, a name that is no folder is one error at once.

The hub's own clients try again for minutes, and then show a page of tracebacks.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.extras import import_extra

_PATIENCE = 5.0  # seconds


def refuse_unreachable(name: str, what: str, *, field: str) -> None:
    """Raises InputError, within seconds, where the hub cannot be reached or must not be."""
    if (reason := _unreachable()) is not None:
        message = f"{what} {name!r} cannot be fetched from the hub: {reason}; give a local folder, or run where the hub can be reached"
        raise InputError(message, field=field)


def offline(error: BaseException) -> str:
    """The first line of what went wrong."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _unreachable() -> str | None:
    constants = import_extra("huggingface_hub.constants", extra="hf", needed_by="a name on the hub")
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "") not in ("", "0"):
        return "the environment says offline"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return None  # the proxy reaches what this machine does not
    at = urlsplit(constants.ENDPOINT)
    host, port = at.hostname or "", at.port or (443 if at.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as error:
        return f"the hub's server ({host}) cannot be reached ({error.strerror or error})"
    return None
