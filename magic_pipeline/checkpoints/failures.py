"""What really went wrong when a publication failed: torch.save hides it, and a wrong answer loses an interrupt.

Whatever a stream's `write` raises inside `torch.save` arrives as a RuntimeError, with the original only in
`__context__`: a full disk looks like a bug in torch, and the interrupt of a preemption like an ordinary failure.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from magic_pipeline.errors import MagicError, StorageError, StorageFullError


def surfaced(
    error: BaseException, handled: BaseException | None, name: str, written: int, size: int | None
) -> BaseException:
    """The exception to raise in place of `error`: the interrupt, a StorageError for an OSError, or `error` itself.

    Args:
        error: what arrived.
        handled: the exception that was being handled when the save began (`sys.exception()`). Python chains it below
            everything raised since; a save made while an interrupt is handled must not report it as its own.
        name: the object, for the message.
        written: bytes that went out before the failure.
        size: bytes that the object needs, where known.
    """
    chain = list(_chain(error, handled))
    for link in chain:
        if not isinstance(link, Exception):
            return link
    if isinstance(error, MagicError):
        return error
    for link in chain:
        if isinstance(link, MagicError):
            return link
        if isinstance(link, OSError):
            return storage_error(link, name, written, size)
    return error


def storage_error(error: OSError, name: str, written: int = 0, size: int | None = None) -> StorageError:
    """The OSError as one line naming the object, the bytes written and needed, and what to do about a full disk."""
    needed = "" if size is None else f" of about {size}"
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(
            f"{name}: no space left after {written} bytes{needed} ({reason}); free space and run again"
        )
    return StorageError(f"{name}: could not be written after {written} bytes{needed}: {type(error).__name__}: {reason}")


def _chain(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """`error` and everything below it by cause and context, each once, without `handled` and what is below that."""
    seen: set[int] = {id(handled)}
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += [link.__cause__, link.__context__]
