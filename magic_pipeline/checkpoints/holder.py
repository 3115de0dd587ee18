"""Who holds a lease, and whether that process is still there. Asks the operating system, never a clock."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# The kernel's first one, whose number is fixed; "" where there are none.
_OUTSIDE_CONTAINERS = ("pid:[4026531836]", "")


@dataclass(frozen=True)
class Holder:
    """A process, named so that another process can tell whether it still lives.

    Attributes:
        run_id: the run on whose behalf it works, for people ("" when there is none).
        host, machine: the host's name, which may not be unique, and a digest of its machine id ("" where it has none).
        boot_id: changes with every boot of the kernel.
        pid_namespace: a pid means something only inside it (containers on one kernel share the boot id).
        pid, started: a pid is reused, but never with the same start time.
        heartbeat: the name of its heartbeat object, for those who cannot look at its process ("" when it has none).
    """

    run_id: str
    host: str
    machine: str
    boot_id: str
    pid_namespace: str
    pid: int
    started: str
    heartbeat: str = ""

    @classmethod
    def this_process(cls, run_id: str = "") -> Holder:
        """The calling process. Asked anew each time, since a fork changes the answer."""
        return cls.process(os.getpid(), run_id)

    @classmethod
    def process(cls, pid: int, run_id: str = "") -> Holder:
        """A process of this machine, in the caller's pid namespace."""
        return cls(run_id, socket.gethostname(), _machine(), _boot_id(), _pid_namespace(), pid, _started(pid) or "")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Holder:
        """Raises KeyError or TypeError when the content is no holder's."""
        content = {"heartbeat": "", **content}
        fields = {name: content[name] for name in cls.__dataclass_fields__}
        if type(fields["pid"]) is not int or not all(isinstance(fields[n], str) for n in fields if n != "pid"):
            raise TypeError(f"expected a holder, found {content!r}")
        return cls(**fields)

    def is_same_process(self, other: Holder) -> bool:
        """Whether both are one process, whatever run they work for."""
        ours = (self.host, self.machine, self.boot_id, self.pid_namespace, self.pid, self.started)
        return ours == (other.host, other.machine, other.boot_id, other.pid_namespace, other.pid, other.started)

    def __str__(self) -> str:
        run = f"run {self.run_id}, " if self.run_id else ""
        return f"{run}process {self.pid} on {self.host}"


def is_gone(holder: Holder) -> bool | None:
    """True: the process has provably ended. False: it lives. None: this machine cannot tell.

    On the same boot of the same machine, in the same pid namespace: gone when there is no such pid, when it started at
    another time, or when it is a zombie that nobody has reaped. On the same machine after a reboot: gone.
    """
    here = Holder.this_process()
    if holder.host != here.host or holder.machine != here.machine or holder.pid_namespace != here.pid_namespace:
        return None
    if holder.boot_id != here.boot_id:
        # Two machines may share a name, and two containers of one image name and machine id; only outside of containers
        # and with a machine id is it certain that this machine was rebooted.
        outside = here.pid_namespace in _OUTSIDE_CONTAINERS
        return True if outside and here.machine and holder.boot_id and here.boot_id else None
    started = _started(holder.pid)
    return None if started is None and _is_hidden(holder.pid) else started != holder.started


def is_stopped(holder: Holder) -> bool:
    """Whether the process lives on this machine and was halted (SIGSTOP, a debugger), so that it does nothing for now."""
    if is_gone(holder) is not False:
        return False
    try:
        text = Path(f"/proc/{holder.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the one that started it dies. Where there is no such kernel, nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before it was asked


def _is_hidden(pid: int) -> bool:
    """Whether there is a process of another user that this one may not look at (/proc mounted with hidepid)."""
    if os.access(f"/proc/{pid}/stat", os.R_OK):
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _started(pid: int) -> str | None:
    """The process's start time, or None when there is no such process or it has ended and is not yet reaped.

    Clock ticks since boot where there is /proc: exact, and unmoved when the wall clock is set.
    """
    if Path("/proc/self/stat").exists():
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        state, *fields = text.rpartition(")")[2].split()  # the command's name before it may hold spaces and brackets
        return None if state in ("Z", "X") else f"ticks:{fields[18]}"
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"unix:{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None


def _machine() -> str:
    identity = _line("/etc/machine-id") or _line("/var/lib/dbus/machine-id")
    # Hashed, as systemd asks: the id itself is not to leave the machine.
    return hashlib.sha256(f"magic-pipeline:{identity}".encode()).hexdigest()[:16] if identity else ""


def _boot_id() -> str:
    identity = _line("/proc/sys/kernel/random/boot_id")
    if identity:
        return identity
    import psutil

    return f"unix:{psutil.boot_time():.0f}"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
