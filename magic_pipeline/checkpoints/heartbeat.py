"""Signs of life: one small object per process, whose counter rises for as long as the process runs.

An observer compares counters, never clocks: a counter that stays the same for EXPIRY of the observer's own time belongs to a
process that has ended, is stopped, or has lost its way to the storage. The thread that counts is its own, so that a long
segment does not look like death.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass, field

from magic_pipeline.checkpoints.holder import Holder
from magic_pipeline.checkpoints.patience import at_most, seconds_from_environment
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import DamagedObjectError, InputError, MagicError, MissingObjectError

logger = logging.getLogger("magic_pipeline.checkpoints")

INTERVAL = 30.0  # seconds between two signs of life
EXPIRY = 120.0  # seconds without one after which a holder is overtaken
TO_LET_GO = 5.0  # seconds for which a lease's end is tried again: what stays behind costs the next one EXPIRY, no more


def interval_seconds() -> float:
    """INTERVAL, or what MAGIC_HEARTBEAT_SECONDS says. Raises InputError."""
    return seconds_from_environment("MAGIC_HEARTBEAT_SECONDS", INTERVAL)


def expiry_seconds() -> float:
    """EXPIRY, or what MAGIC_EXPIRY_SECONDS says. The same for all who share a storage.

    Raises: InputError, also when it leaves no room for two signs of life: then the living would be overtaken.
    """
    expiry, interval = seconds_from_environment("MAGIC_EXPIRY_SECONDS", EXPIRY), interval_seconds()
    if expiry < 2 * interval or interval == 0:
        raise InputError(
            f"expected at least twice MAGIC_HEARTBEAT_SECONDS ({interval:g}, which is not to be 0), found {expiry:g}",
            field="MAGIC_EXPIRY_SECONDS",
        )
    return expiry


@dataclass
class Heartbeat:
    """This process's heartbeat in a folder. Leases share it: it beats while one of them is held."""

    store: Store
    folder: str
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    leases: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _beats: int = 0

    @property
    def path(self) -> str:
        return _path(self.folder, self.process)

    def start(self) -> None:
        """The first beat is durable when this returns. Raises StorageError; InputError when the times make no sense."""
        expiry_seconds()
        self._beat()
        threading.Thread(target=self._beat_on, name="magic-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Beats no more, and removes the object as far as the storage can be reached, soon."""
        self._ended.set()
        try:
            with at_most(TO_LET_GO):
                self.store.delete(self.path)
        except MagicError as error:
            logger.warning("%s/%s stays until gc: %s", self.store.url, self.path, error)

    def _beat_on(self) -> None:
        while not self._ended.wait(interval_seconds()):
            try:
                self._beat()
            except Exception as error:  # noqa: BLE001 - a thread that ended would be the death of a process that lives
                logger.warning("no sign of life could be given: %s", error)

    def _beat(self) -> None:
        self._beats += 1
        self.store.replace_json(self.path, {"beats": self._beats, "holder": Holder.this_process().as_json()})
        if self._ended.is_set():
            self.store.delete(self.path)  # it was stopped meanwhile


_running: dict[tuple[int, int, str], Heartbeat] = {}  # by process (a fork is another one), store and folder
_lock = threading.RLock()


def hold(store: Store, folder: str) -> Heartbeat:
    """The process's heartbeat in this folder, begun if it does not beat yet. Give it back with `let_go`."""
    # Not by URL: one bucket's name at two endpoints is two storages. The heartbeat keeps its store, so the id stays its own.
    key = (os.getpid(), id(store), folder)
    with _lock:
        heartbeat = _running.get(key)
        if heartbeat is None:
            heartbeat = Heartbeat(store, folder)
            heartbeat.start()
            _running[key] = heartbeat
        heartbeat.leases += 1
        return heartbeat


def let_go(heartbeat: Heartbeat) -> None:
    """One lease less; the last one ends the heartbeat."""
    with _lock:
        heartbeat.leases -= 1
        if heartbeat.leases == 0:
            _running.pop((os.getpid(), id(heartbeat.store), heartbeat.folder), None)
            heartbeat.stop()


_seen_dead: dict[tuple[str, str], int | None] = {}  # (storage, object) -> the counter that did not rise


def is_beating(store: Store, folder: str, process: str) -> bool:
    """Watches a process's counter until it rises (True) or has not risen for EXPIRY (False).

    A time in which the storage could not be read does not count, for then the process could not write either. Who was found
    dead at some counter is dead at it without another wait.

    Raises: StorageError when the storage cannot be read for longer than it is tried.
    """
    path = _path(folder, process)
    expiry = expiry_seconds()
    pause = min(5.0, interval_seconds() / 4, expiry / 8)
    first = _count(store, path)
    if (store.url, path) in _seen_dead and _seen_dead[store.url, path] == first:
        return False
    logger.info("watching %s/%s for up to %.0f s: does its process live?", store.url, path, expiry)
    since = seen = time.monotonic()
    while time.monotonic() - since < expiry:
        time.sleep(pause)
        count = _count(store, path)
        if count != first and count is not None:
            return True
        now = time.monotonic()
        if now - seen > pause + expiry / 4:
            since = now
        seen = now
    _seen_dead[store.url, path] = first
    return False


def _count(store: Store, path: str) -> int | None:
    try:
        return int(store.read_json(path)["beats"])
    except (MissingObjectError, DamagedObjectError, KeyError, TypeError, ValueError):
        return None


def _path(folder: str, process: str) -> str:
    return f"{folder}/{process}.json"
