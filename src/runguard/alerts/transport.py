"""One POST with the standard library: to a checked address, within one time limit, without redirects or proxies."""

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

_MAX_ANSWER: Final = 64 * 1024  # for status line, headers and the read part of the body
_EXCERPT: Final = 2_048
_TOO_MANY: Final = 429


class UndeliveredError(Exception):
    """An attempt failed. ``again``: a retry may help. ``wait_s``: the requested pause. ``excerpt``: the answer."""

    def __init__(self, reason: str, *, again: bool, wait_s: float | None = None, excerpt: str = "") -> None:
        super().__init__(reason)
        self.reason, self.again, self.wait_s, self.excerpt = reason, again, wait_s, excerpt


def post(endpoint: Endpoint, headers: Mapping[str, str], body: bytes, timeout_s: float) -> None:
    """Return when the server accepted the message; otherwise raise UndeliveredError without path or headers."""
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
        raise UndeliveredError("the name could not be resolved", again=True) from None
    except OSError as error:
        reason = (
            os.strerror(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else type(error).__name__
        )
        raise UndeliveredError(f"the connection failed ({reason})", again=True) from None
    except http.client.HTTPException as error:
        raise UndeliveredError(f"the answer was not HTTP ({type(error).__name__})", again=True) from None
    finally:
        connection.hang_up()


def _judge(answer: http.client.HTTPResponse) -> None:
    status = answer.status
    if 200 <= status < 300:
        return  # the body adds nothing; waiting for it could only turn a success into a failure
    reason = f"{status} {http.client.responses.get(status, '')}".rstrip()  # the server's own phrase is not trusted
    if 300 <= status < 400:
        raise UndeliveredError(f"{reason}: a redirect, and redirects are not followed", again=False)
    if status == _TOO_MANY or status >= 500:
        wait_s = _retry_after(answer.getheader("Retry-After"))
        raise UndeliveredError(
            reason if wait_s is None else f"{reason}, to be tried in {wait_s:g} s", again=True, wait_s=wait_s
        )
    excerpt = b""
    with suppress(OSError, http.client.HTTPException):  # only the status decides
        excerpt = answer.read1(_EXCERPT)
    raise UndeliveredError(reason, again=False, excerpt=excerpt.decode("utf-8", "replace"))


def _retry_after(value: str | None) -> float | None:
    """Return the seconds to wait from a number or a date; None if it cannot be parsed."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)  # noqa: TID251 - a date refers to the wall clock
    except (ValueError, OverflowError):
        return None


class _Pinned(http.client.HTTPConnection):
    """Connects to a checked address instead of resolving the name again; the name stays in Host and in TLS."""

    def __init__(self, endpoint: Endpoint, end: float) -> None:
        super().__init__(endpoint.host, endpoint.port)
        self._endpoint, self._end = endpoint, end
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        places = resolve(self._endpoint)
        for number, (family, sockaddr) in enumerate(places, 1):
            # an address that never answers leaves time for the next
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
    """A socket with one time limit for the whole exchange, also for a server that sends single bytes."""

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
        """Do nothing: the owner of the connection closes it, also while the answer is being read."""


class _Answer(io.RawIOBase):
    """Reads the server's answer up to a limit."""

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
