"""Attempts per success against a server that answers 429: with a plain retry loop, with ``on_rate_limit="wait"``, and
with a budget that waits.

    python benchmarks/rate_limits.py

Twenty workers need five answers each from a local server that takes ten requests a second and answers the others with
429 and ``Retry-After``. Each worker retries by itself, after 0.1 s and then twice as long each time, up to 2 s.
"""

import argparse
import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from runguard import Budget, guard_async

WORKERS, ANSWERS, PER_SECOND = 20, 5, 10


class Limited(ThreadingHTTPServer):
    """Takes so many requests in each second of the clock."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._lock = threading.Lock()
        self._second, self._taken = 0, 0
        self.attempts = self.successes = 0

    def take(self) -> bool:
        with self._lock:
            self.attempts += 1
            second = int(time.time())  # noqa: TID251 - windows of a second of the wall clock
            if second != self._second:
                self._second, self._taken = second, 0
            self._taken += 1
            is_free = self._taken <= PER_SECOND
            self.successes += is_free
            return is_free


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Limited

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_free = self.server.take()
        body = json.dumps({"tokens": 1}).encode()
        self.send_response(200 if is_free else 429)
        if not is_free:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Quiet."""


@contextlib.contextmanager
def serving() -> Iterator[Limited]:
    server = Limited()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


async def measure(**policy: Any) -> tuple[float, float]:
    """Attempts per success, and seconds for all answers."""
    with serving() as server:
        url = f"http://127.0.0.1:{server.server_port}/"
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=WORKERS), timeout=30) as client:

            async def ask() -> Any:
                answer = await client.post(url, json={})
                answer.raise_for_status()
                return answer.json()

            guarded = guard_async(ask, max_wait_seconds=60, **policy)

            async def work(number: int) -> None:
                chance = random.Random(number)
                for _ in range(ANSWERS):
                    pause = 0.1
                    while True:
                        try:
                            await guarded()
                            break
                        except httpx.HTTPStatusError:
                            await asyncio.sleep(pause * chance.uniform(0.5, 1.5))
                            pause = min(pause * 2, 2.0)

            began = time.perf_counter()
            await asyncio.gather(*(work(number) for number in range(WORKERS)))
            return server.attempts / server.successes, time.perf_counter() - began


WAYS: dict[str, dict[str, Any]] = {
    "plain retries": {"on_rate_limit": "pass"},
    'on_rate_limit="wait"': {"on_rate_limit": "wait"},
    "a budget that waits": {"budget": [Budget(calls=PER_SECOND, per="app", window="1s", on_exhausted="wait")]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"{WORKERS} workers, {ANSWERS} answers each, {PER_SECOND} requests a second; median of {rounds}")
    for name, policy in WAYS.items():
        results = sorted(asyncio.run(measure(**policy)) for _ in range(rounds))
        attempts, seconds = results[len(results) // 2]
        print(f"{name:22} {attempts:5.2f} attempts per success, {seconds:5.1f} s")


if __name__ == "__main__":
    main()
