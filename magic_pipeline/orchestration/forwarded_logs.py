"""The `magic_pipeline` loggers, shown in the run's log while an op works."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from dagster import DagsterLogManager

LOGGER = logging.getLogger("magic_pipeline")


class _RunLogHandler(logging.Handler):
    def __init__(self, log: DagsterLogManager) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log.log(record.levelno, record.getMessage())
        except Exception:  # noqa: BLE001 - logging's own rule: a handler reports and never raises
            # A run's log that cannot be written must not end the work that it tells of.
            self.handleError(record)


@contextmanager
def forwarded_logs(log: DagsterLogManager) -> Iterator[None]:
    """Within, everything from INFO on that this project logs also goes to the run's log."""
    handler = _RunLogHandler(log)
    level = LOGGER.level
    LOGGER.addHandler(handler)
    if LOGGER.getEffectiveLevel() > logging.INFO:
        LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
