"""The family of errors that every room raises. Nothing but exception classes belongs here.

Which of them Dagster may retry is decided in one place, `magic_pipeline.orchestration`, by class.
"""

from __future__ import annotations


class MagicError(Exception):
    """Anything magic_pipeline raises on purpose. The message is one line that a person can act on."""


class InputError(MagicError):
    """The user's input is wrong: exit code 2, never retried.

    Args:
        message: what was expected, what was found, and what to do.
        file: the file at fault, if there is one.
        line: the line of the file at fault, counted from 1, where it is known.
        field: the dotted field, document id or query id at fault, if there is one.
    """

    def __init__(self, message: str, *, file: object = None, line: int | None = None, field: str | None = None) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.line = line
        self.field = field
        at_line = None if line is None else f"line {line}"
        where = ": ".join(part for part in (self.file, at_line, self.field) if part)
        super().__init__(f"{where}: {message}" if where else message)

    def in_file(self, file: object) -> InputError:
        """The same error, naming this file where it names none yet."""
        return self if self.file is not None else InputError(self.message, file=file, line=self.line, field=self.field)


class NonFiniteError(MagicError):
    """A loss, gradient, cotangent or score is NaN or infinite. Never retried: it would come again."""


class TrajectoryMismatchError(MagicError):
    """A rematerialised state differs from the sealed one beyond tolerance, so the walk would be of another run."""


class StorageError(MagicError):
    """Storage could not be read or written (full disk, refused, unreachable). May be retried."""


class StorageFullError(StorageError):
    """The disk or quota is full. Not retried: somebody has to free space first."""


class CredentialsError(StorageError):
    """Storage refuses these credentials: expired, wrong, or not allowed to. Not retried: they would be refused again."""


class MissingObjectError(StorageError):
    """The named object is not there."""


class DamagedObjectError(StorageError):
    """The named object does not have the bytes that were sealed."""


class ObjectExistsError(StorageError):
    """A create-only object is there already: somebody else was first."""


class HeldError(MagicError):
    """Another live process holds the lease. `holder` describes it (host, pid, run id)."""

    def __init__(self, message: str, *, holder: dict[str, object]) -> None:
        self.holder = holder
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return _held, (str(self), self.holder)


def _held(message: str, holder: dict[str, object]) -> HeldError:
    """For pickle, which knows no keyword arguments."""
    return HeldError(message, holder=holder)


class LeaseLostError(MagicError):
    """A higher epoch exists: another process took this work over. Stop without writing."""


class GangError(MagicError):
    """A process of a gang died, or none of them went on. May be retried: what was sealed stays."""


class InterruptedWalkError(MagicError):
    """Training or a walk stopped because it was asked to; everything up to here is sealed and a rerun goes on."""
