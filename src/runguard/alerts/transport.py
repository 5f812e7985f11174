"""One POST by the standard library: to an address that was checked, within one time limit, with no redirect and no
proxy.
"""

import http.client
import io
import os
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Final

from runguard.alerts.addresses import Endpoint, RefusedAddressError, resolve

_MAX_ANSWER: Final = 64 * 1024  # of status line, headers and what is read of the body
_EXCERPT: Final = 2_048
_TOO_MANY: Final = 429


class UndeliveredError(Exception):
    """An attempt failed. ``again`` says whether another one may help, ``wait_s`` what the server asked for, ``excerpt``
    what it said.
    """

    def __init__(self, reason: str, *, again: bool, wait_s: float | None = None, excerpt: str = "") -> None:
        super().__init__(reason)
        self.reason, self.again, self.wait_s, self.excerpt = reason, again, wait_s, excerpt


def post(endpoint: Endpoint, headers: Mapping[str, str], body: bytes, timeout_s: float) -> None:
    """Return when the server said yes; raise UndeliveredError otherwise, whose reason shows neither path nor header."""
    connection = _Pinned(endpoint, time.monotonic() + timeout_s)
    try:
        connection.request(
            "POST", endpoint.path.reveal(), body, {"Host": endpoint.authority, "Connection": "close", **headers}
        )
        _judge(connection.getresponse())
    except RefusedAddressError as error:
        raise UndeliveredError(str(error), again=False) from None
    except ssl.SSLCertVerificationError as error:
        raise UndeliveredError(f"the certificate is not trusted ({error.verify_message})", again=False) from None
    except TimeoutError:
        raise UndeliveredError(f"no answer within {timeout_s:g} s", again=True) from None
    except socket.gaierror:
        raise UndeliveredError("the name could not be looked up", again=True) from None
    except OSError as error:
        said = os.strerror(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else type(error).__name__
        raise UndeliveredError(f"the connection failed ({said})", again=True) from None
    except http.client.HTTPException as error:
        raise UndeliveredError(f"the answer was not HTTP ({type(error).__name__})", again=True) from None
    finally:
        connection.hang_up()


def _judge(answer: http.client.HTTPResponse) -> None:
    status = answer.status
    if 200 <= status < 300:
        return  # the body says nothing more, and waiting for it could only undo a success
    said = f"{status} {http.client.responses.get(status, '')}".rstrip()  # the server's own phrase could be anything
    if 300 <= status < 400:
        raise UndeliveredError(f"{said}: a redirect, and redirects are not followed", again=False)
    if status == _TOO_MANY or status >= 500:
        wait_s = _retry_after(answer.getheader("Retry-After"))
        raise UndeliveredError(
            said if wait_s is None else f"{said}, to be tried in {wait_s:g} s", again=True, wait_s=wait_s
        )
    excerpt = b""
    with suppress(OSError, http.client.HTTPException):  # the status alone decides
        excerpt = answer.read1(_EXCERPT)
    raise UndeliveredError(said, again=False, excerpt=excerpt.decode("utf-8", "replace"))


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait, from a number or a date; None for what cannot be read."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)  # noqa: TID251 - a date is on the wall's clock
    except (ValueError, OverflowError):
        return None


class _Pinned(http.client.HTTPConnection):
    """Connects to an address that was checked, not to whatever the name means by then; the name stays in Host and in
    TLS.
    """

    def __init__(self, endpoint: Endpoint, end: float) -> None:
        super().__init__(endpoint.host, endpoint.port)
        self._endpoint, self._end = endpoint, end
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        places = resolve(self._endpoint)
        for number, (family, sockaddr) in enumerate(places, 1):
            # one that never answers leaves time for the next
            share = (self._end - time.monotonic()) / (len(places) - number + 1)
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(share, 0.001))
                sock.connect(sockaddr)
                self._socket = _secured(sock, self._endpoint)
            except OSError as error:
                sock.close()
                if number == len(places) or isinstance(error, ssl.SSLCertVerificationError):
                    raise
            else:
                self.sock: Any = _Timed(self._socket, self._end)
                return

    def hang_up(self) -> None:
        self.close()
        if self._socket is not None:
            self._socket.close()


def _secured(sock: socket.socket, endpoint: Endpoint) -> socket.socket:
    return _trust().wrap_socket(sock, server_hostname=endpoint.host) if endpoint.scheme == "https" else sock


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the certificates takes a while


class _Timed:
    """A socket with one time limit for everything: a server that sends a byte now and then does not get a new one with
    each.
    """

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end

    def ready(self) -> socket.socket:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._sock

    def sendall(self, data: bytes) -> None:
        self.ready().sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Answer(self))

    def close(self) -> None:
        """Called while the answer is still being read: the connection is hung up by whoever made it."""


class _Answer(io.RawIOBase):
    """What the server says, up to a limit of its length."""

    def __init__(self, sock: _Timed) -> None:
        self._sock, self._read = sock, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._read > _MAX_ANSWER:
            raise ConnectionAbortedError
        count = self._sock.ready().recv_into(buffer)
        self._read += count
        return count
