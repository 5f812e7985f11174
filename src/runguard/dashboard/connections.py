"""Limits for connections of the dashboard: a deadline for each request, and a highest number of open connections.

Another program on this machine could open connections and send only half a request on each. uvicorn would wait for it
without a limit.
"""

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS: Final = 5.0  # for a complete request
MOST_WAITING: Final = 32  # connections without a complete request; one more closes the oldest
MOST_OPEN: Final = 128  # all connections; one more is closed at once


class BoundedProtocol(H11Protocol):
    """uvicorn's own protocol with a deadline for each request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Connections closed just now are still listed until the next turn of the event loop.
        still_open = [
            one for one in self.connections if isinstance(one, BoundedProtocol) and not one.transport.is_closing()
        ]
        if len(still_open) > MOST_OPEN:
            transport.abort()
            return
        self._wait()
        waiting = [(one._deadline.when(), one) for one in still_open if one._deadline is not None]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda entry: entry[0])[1].transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """More bytes do not move the deadline."""
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
