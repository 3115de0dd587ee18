"""A real Postgres server on loopback, with its data in a temporary folder and a password of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.servers.children import Child, running

USER, DATABASE = "magic", "magic"
_READY_SECONDS = 60


@dataclass
class PostgresServer:
    """Where it listens, and how to log in.

    Attributes:
        programs: the folder of postgres and its tools.
        folder: its data, in a folder that its user may enter.
    """

    programs: Path
    folder: Path
    port: int
    password: str
    _child: Child | None = None
    _ends: contextlib.ExitStack | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What deploy/server/environment.example asks for."""
        return {
            "MAGIC_POSTGRES_HOST": "127.0.0.1",
            "MAGIC_POSTGRES_PORT": str(self.port),
            "MAGIC_POSTGRES_USER": USER,
            "MAGIC_POSTGRES_PASSWORD": self.password,
            "MAGIC_POSTGRES_DB": DATABASE,
        }

    def start(self) -> None:
        """Starts it on its data, and waits until it answers."""
        ends = contextlib.ExitStack()
        listen = ["-h", "127.0.0.1", "-p", str(self.port), "-c", "unix_socket_directories="]
        command = as_its_user([str(self.programs / "postgres"), "-D", str(self.folder / "data"), *listen])
        self._child = ends.enter_context(
            running(command, environment={"LC_ALL": "C", "PATH": os.environ.get("PATH", "")}, folder=self.folder)
        )
        self._ends, until = ends, time.monotonic() + _READY_SECONDS
        while self._ask("pg_isready", "-q").returncode:
            self._child.check()
            if time.monotonic() > until:
                raise TimeoutError(f"Postgres is not ready after {_READY_SECONDS} s: {self._child.output()}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to every process of it at once, as when its machine loses power."""
        if self._child is None or self._ends is None:
            return
        own = psutil.Process(self._child.pid)
        family = [own, *own.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._ends.close()
        psutil.wait_procs(family, timeout=10)
        self._child = self._ends = None

    def make_database(self, name: str = DATABASE) -> None:
        """An empty database."""
        made = self._ask("createdb", name)
        if made.returncode:
            raise RuntimeError(f"createdb {name}: {made.stderr}")

    def _ask(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER]
        environment = {"PGPASSWORD": self.password, "LC_ALL": "C"}
        command = [str(self.programs / tool), *where, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def programs() -> Path | None:
    """The folder of postgres, initdb and the rest; None where Postgres is not installed."""
    on_path = shutil.which("postgres")
    found = [Path(on_path).resolve().parent] if on_path else []
    # Debian leaves a server's own programs off the PATH, a folder a release.
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: int(one.parent.name), reverse=True)
    return next((one for one in found if (one / "initdb").exists() and (one / "postgres").exists()), None)


def as_its_user(command: Sequence[str]) -> list[str]:
    """The command as somebody other than root, whom Postgres refuses, killed with its parent all the same."""
    if os.geteuid():
        return list(command)
    setpriv = shutil.which("setpriv") or "setpriv"
    user = _user()
    switch = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--pdeathsig", "KILL"]
    return [setpriv, *switch, *command]


def _user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server with an empty database, which ends, and whose data go, with the context.

    Raises:
        FileNotFoundError: Postgres is not installed.
    """
    found = programs()
    if found is None:
        raise FileNotFoundError("Postgres is not installed; on Debian: apt-get install postgresql")
    with tempfile.TemporaryDirectory(prefix="magic-postgres-") as name:
        folder, password = Path(name), secrets.token_hex(16)
        if not os.geteuid():
            os.chown(folder, _user().pw_uid, _user().pw_gid)
        secret = folder / "password"
        secret.write_text(password)
        secret.chmod(0o644)  # the folder is its user's alone
        initialise = ["-D", str(folder / "data"), "-U", USER, "-A", "scram-sha-256", f"--pwfile={secret}"]
        command = as_its_user([str(found / "initdb"), *initialise, "-E", "UTF8", "--locale=C", "--no-sync"])
        made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=120)
        if made.returncode:
            raise RuntimeError(f"initdb: {made.stdout}{made.stderr}")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        server = PostgresServer(found, folder, port, password)
        try:
            server.start()
            server.make_database()
            yield server
        finally:
            server.kill()
