"""A TCP proxy on the loopback, between a client and a real server.

It can be cut, stalled and pointed at another server, and it can damage what passes.
"""

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

Send = Callable[[bytes], None]
# the bytes, whether the server sent them, how many were before them, where they go; False: close
Pass = Callable[[bytes, bool, int, Send], bool]


def _unchanged(data: bytes, _: bool, __: int, send: Send) -> bool:
    send(data)
    return True


class Proxy:
    """Every connection to ``port`` is passed on to the server.

    ``url`` is a server's URL with the proxy's port in it.
    """

    def __init__(self, port: int, on_data: Pass = _unchanged) -> None:
        self._server, self._on_data = port, on_data
        self._stalled, self._links = False, list[socket.socket]()
        self._door = self._listen(0)
        self.port: int = self._door.getsockname()[1]

    @classmethod
    def before(cls, url: str, on_data: Pass = _unchanged) -> tuple["Proxy", str]:
        """A proxy for the server of a URL, and the URL that leads through it."""
        port = urlsplit(url).port
        assert port is not None
        proxy = cls(port, on_data)
        return proxy, url.replace(f":{port}/", f":{proxy.port}/")

    def _listen(self, port: int) -> socket.socket:
        door = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(door,), daemon=True).start()
        return door

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                near, _ = door.accept()
            except OSError:
                return  # the proxy was cut
            try:
                far = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                near.close()  # the server is away
                continue
            for link in (near, far):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target, source is far), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, from_server: bool) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self._stalled:
                    time.sleep(0.005)
                if not self._on_data(data, from_server, number, target.sendall):
                    break
                number += 1
        _end(source, target)

    def stall(self) -> None:
        """What is sent arrives when the proxy is mended."""
        self._stalled = True

    def cut(self) -> None:
        """Close every connection and accept no new one until the proxy is mended."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.drop()

    def drop(self) -> None:
        """Close every connection."""
        links, self._links = self._links, []
        _end(*links)
        for link in links:
            link.close()

    def mend(self) -> None:
        if self._stalled:
            self._stalled = False
        else:
            self._door = self._listen(self.port)

    def point(self, port: int) -> None:
        """From now on another server answers, as after a failover."""
        self._server = port
        self.drop()


def _end(*links: socket.socket) -> None:
    for link in links:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


# ---- damage ---------------------------------------------------------------------------------------------------------

GREETING: Final = 8
FAULTS: Final = (
    "delay",
    "cut",
    "cut within",
    "truncate",
    "duplicate",
    "repeat late and cut",
    "repeat the end",
    "swallow",
)


class Chaos:
    """Damages what passes, at random: give it to a ``Proxy``. ``share`` is the part of all chunks that meet a
    fault; set it to 0 to end the faults.

    The first chunks of a connection are a greeting and meet fewer faults: else hardly any connection would get as
    far as a call.
    """

    def __init__(self, seed: str, share: float, longest: float, faults: tuple[str, ...] = FAULTS) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.share, self._longest, self._faults = share, longest, faults
        self.made: Counter[str] = Counter()

    def __call__(self, data: bytes, from_server: bool, number: int, send: Send) -> bool:
        share = self.share if number >= GREETING else self.share / 5
        with self._lock:
            fault = self._random.choice(self._faults) if self._random.random() < share else ""
            part, seconds = self._random.randrange(len(data)), self._random.uniform(0, self._longest)
            if fault:
                self.made[f"{fault} a {'reply' if from_server else 'request'}"] += 1
        match fault:
            case "delay":
                time.sleep(seconds)
                send(data)
            case "cut":
                return False
            case "cut within":
                send(data[:part])
                return False
            case "truncate":  # the end is lost, the connection stays
                send(data[:part])
            case "duplicate":
                send(data + data)
            case "repeat late and cut":  # the copy arrives when the next request is under way
                send(data)
                time.sleep(min(seconds, 0.02))
                send(data)
                return False
            case "repeat the end":
                send(data + data[part:])
            case "swallow":
                pass
            case _:
                send(data)
        return True
