"""What Dagster does with an error of the mission: fail for good, try again, or treat it as an interrupt. Decided here
alone.

| error | consequence |
|---|---|
| an interrupt, also one in another error's context | raised as Dagster's: CANCELED, or the run is retried |
| StorageFullError, CredentialsError | fails at once: waiting frees no space and renews no credentials |
| any other StorageError, OSError, LeaseLostError, HeldError, GangError | tried again in the same run, up to three times |
| any other error | the step fails for good, with the error's one line |
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from dagster._core.errors import DagsterExecutionInterruptedError

from magic_pipeline.errors import (
    CredentialsError,
    GangError,
    HeldError,
    InputError,
    LeaseLostError,
    MagicError,
    StorageError,
    StorageFullError,
)
from magic_pipeline.orchestration.interrupts import is_interrupt

logger = logging.getLogger("magic_pipeline.orchestration")

RETRIES = 3
_WAIT_SECONDS = (5, 20, 60)
_TRANSIENT = (StorageError, OSError, LeaseLostError, HeldError, GangError)
_LASTING = (StorageFullError, CredentialsError)


@contextmanager
def classified_failures(context: dg.OpExecutionContext | dg.AssetExecutionContext) -> Iterator[None]:
    """Turn whatever comes out of the body into what Dagster should make of it."""
    try:
        yield
    except (dg.Failure, dg.RetryRequested, DagsterExecutionInterruptedError, GeneratorExit):
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise DagsterExecutionInterruptedError from error
        transient = isinstance(error, _TRANSIENT) and not isinstance(error, _LASTING)
        if transient and context.retry_number < RETRIES:
            wait = _WAIT_SECONDS[min(context.retry_number, len(_WAIT_SECONDS) - 1)]
            logger.warning("%s. Trying again in %d s.", one_line(error).rstrip("."), wait)
            raise dg.RetryRequested(max_retries=RETRIES, seconds_to_wait=wait) from error
        raise failure(error) from error


def failure(error: BaseException) -> dg.Failure:
    """The final failure: its description is the error's one line, and it records whether the input was at fault."""
    kind = "input" if isinstance(error, InputError) else "other"
    return dg.Failure(one_line(error), metadata={"error": type(error).__name__, "kind": kind}, allow_retries=False)


def one_line(error: BaseException) -> str:
    """The error in one line; errors that this project did not raise on purpose carry their class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MagicError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
