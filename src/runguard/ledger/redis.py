"""One connection to a Redis or Valkey server: running scripts on it, and checking what server it is."""

import hashlib
import logging
import socket
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, Final

from runguard.core.errors import PolicyError, RunGuardError
from runguard.ledger.identity import IDENTITY, Seen, new_id
from runguard.ledger.redis.encoding import command_of
from runguard.ledger.redis.error_mapping import OtherIdentityError, is_read_only, store_error_of
from runguard.ledger.store import SCHEMA_VERSION, StoreError, StoreOutage

_IDLE_S: Final = 1.0
_PEEKED: Final = 65_536
# scripts that may run twice: the second run changes nothing
_REPEATABLE: Final = frozenset(
    {"reserve", "settle", "settle_and_reserve", "next_call", "release", "read", "running", "list", "about", "command"}
)
_USES: Final = {"settle_and_reserve": ("settle", "reserve")}  # scripts that call other ones
# scripts that do without common.lua, because defining its functions takes as long as such a script
_WHOLE: Final = ("next_call",)
_log: Final = logging.getLogger("runguard")
_warned: Final[set[str]] = set()  # stores of this process whose settings could not be read


class RedisConnection:
    """One connection. It is opened when it is needed and reopened after a loss.

    Only scripts that may run twice are repeated; the caller decides about the others.
    """

    def __init__(self, url: str, name: str, namespace: str, timeout: float, seen: Seen) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise PolicyError(
                f"store = '{url.partition('://')[0]}://…' needs the redis package: pip install 'runguard-agents[redis]'"
            ) from None
        self._name, self._prefix, self._seen = name, f"{{{namespace}}}:", seen
        self._errors = (redis.RedisError, OSError, UnicodeDecodeError)
        self._no_script, self._lost, self._late = (
            redis.exceptions.NoScriptError,
            redis.exceptions.ConnectionError,
            redis.exceptions.TimeoutError,
        )
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout / 2,
                socket_connect_timeout=timeout / 2,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
                decode_responses=True,
                # version 3 is not needed: its greeting costs a round trip more, and some proxies do not speak it
                protocol=2,
            )
        except (ValueError, TypeError, redis.RedisError) as error:
            raise PolicyError(f"store = {name!r}: {error}") from None
        self._send: Callable[..., Any] = self._client.execute_command
        self._link: Any = (
            None  # one connection for the scripts: taking it from the pool each time costs as much as a call
        )
        self._used, self._asked = 0.0, 0
        try:
            self._check_eviction()
            self._meet() if seen.text else self._migrate()
        except BaseException:
            self.close()
            raise

    def _check_eviction(self) -> None:
        """Refuse a server that deletes keys when memory is short: it would forget what was spent, or that a side
        effect was done.
        """
        found = self._memory_settings()
        if found is None:
            _warn_once(
                self._name,
                f"{self._name}: this user may use neither INFO nor CONFIG GET, so it is not known whether the "
                "server deletes keys when memory is short. "
                "Check that its maxmemory-policy is noeviction, or allow the command with +info",
            )
            return
        limit, policy = found
        if limit and policy != "noeviction":
            raise StoreError(
                f"{self._name}: maxmemory is set and maxmemory-policy is {policy}: when memory is short this "
                "server would delete accounts or "
                "claims, and money would be spent twice. Set maxmemory-policy noeviction, or use another server"
            )

    def _memory_settings(self) -> tuple[int, str] | None:
        """The server's memory limit and what it does at the limit; None where this user may not ask."""
        for command, part in (("INFO", "memory"), ("CONFIG GET", "maxmemory*")):
            settings = self._server_settings(command, part)
            limit, policy = int(settings.get("maxmemory") or 0), str(settings.get("maxmemory_policy") or "")
            if "maxmemory" in settings and (policy or not limit):
                return limit, policy
        return None

    def forgets_in_a_crash(self) -> bool | None:
        """Whether the server keeps no append-only file, so that a crash loses what was booked since its last snapshot.

        None where this user may not ask.
        """
        kept = self._server_settings("INFO", "persistence").get("aof_enabled")
        if kept is None:
            kept = {"yes": 1, "no": 0}.get(str(self._server_settings("CONFIG GET", "appendonly").get("appendonly")))
        return None if kept is None else not int(kept)

    def _server_settings(self, command: str, part: str) -> dict[str, Any]:
        """Settings of the server by name; empty where this user may not ask, or the command has another name."""
        try:
            return {str(name).replace("-", "_"): value for name, value in self._send(command, part).items()}
        except self._errors as error:
            known = self._error_of(error)
            if isinstance(known, StoreOutage) or command.split(" ")[0] not in str(error).upper():
                raise known from error
            return {}

    def _meet(self) -> None:
        """Find out which store this is. Creates nothing, in case it is another one than before."""
        expected = self._seen.text
        version, identity = self._values("schema", f"t:{IDENTITY}")
        self._seen.meet(expected, identity or "")
        self._check(version or "")

    def _migrate(self) -> None:
        version, identity = self._run("open", new_id())
        self._check(version)
        self._seen.meet(self._seen.text, identity)

    def _check(self, version: str) -> None:
        if version == str(SCHEMA_VERSION):
            return
        if version.isdecimal() and int(version) > SCHEMA_VERSION:
            raise StoreError(
                f"{self._name}: its schema is version {version}, made by a newer RunGuard; this one knows "
                f"version {SCHEMA_VERSION}. Upgrade runguard-agents"
            )
        found = f"schema version {version}" if version else "it holds data and no schema version"
        raise StoreError(
            f"{self._name}: this namespace belongs to something else ({found}); choose another with ?namespace=name"
        )

    # ---- scripts ----------------------------------------------------------------------------------------------------

    def _run(self, script: str, *args: str | bytes) -> Any:
        try:
            return self._run_here(script, args)
        except OtherIdentityError:
            self._meet()  # raises, unless this one was adopted
            return self._run_here(script, args)

    def _run_here(self, script: str, args: tuple[str | bytes, ...]) -> Any:
        try:
            try:
                return self._call(script, args)
            except self._lost:
                if script not in _REPEATABLE:
                    raise
                # again on a new connection; if the first one took effect, the second changes nothing
                return self._call(script, args)
        except self._errors as error:
            raise self._error_of(error) from error

    def _call(self, script: str, args: tuple[str | bytes, ...]) -> Any:
        """Run a script once. Its answer ends with the number of this request, so that the answer to another request
        is never taken for it.
        """
        sha, source = script_of(script)
        self._asked += 1
        number = b"%d" % self._asked
        tail = (
            b"1",
            self._prefix.encode(),
            *[arg if isinstance(arg, bytes) else arg.encode() for arg in args],
            self._seen.text.encode(),
            number,
        )
        try:
            return self._straight(command_of(b"EVALSHA", sha, *tail), number)
        except self._no_script:  # a server that was restarted, or is another one
            return self._straight(command_of(b"EVAL", source, *tail), number)

    def _straight(self, command: bytes, number: bytes) -> Any:
        """Send one command on the connection for scripts. After a pause, first check whether the server closed it.

        Any error closes the connection, because what arrives next on it may belong to this request.
        """
        link, now = self._link, time.monotonic()
        if link is None:
            link = self._link = self._client.connection_pool.get_connection()
        elif now - self._used > _IDLE_S:
            try:
                gone = link.can_read()  # no answer is due: whatever can be read is the end
            except self._errors:
                gone = True
            if gone:
                link.disconnect()
        self._used = now
        link.send_packed_command((command,))  # connects if necessary
        try:
            return self._answer(link, number)
        except TimeoutError:
            link.disconnect()
            raise self._late("Timeout reading from socket") from None
        except OSError as error:
            link.disconnect()
            raise self._lost(f"Error while reading from socket: {error}") from None
        except BaseException:  # also an interrupt: this answer must not be read as the next one's
            link.disconnect()
            raise

    def _answer(self, link: Any, number: bytes) -> Any:
        sock = getattr(link, "_sock", None)
        if type(sock) is socket.socket:  # TLS does not allow peeking
            # Most answers are one text, for which the client's parser takes longer than the server. Other answers stay
            # in the socket for the parser.
            seen, end = sock.recv(_PEEKED, socket.MSG_PEEK), b"\r\n$%d\r\n%b\r\n" % (len(number), number)
            if seen.startswith(b"*2\r\n$") and seen.endswith(end):
                size, _, text = seen[5 : -len(end)].partition(b"\r\n")
                if size.isdigit() and len(text) == int(size):
                    sock.recv(len(seen))
                    return text.decode()
        found = link.read_response()
        if type(found) is not list or len(found) != 2 or found[1] != number.decode():
            raise self._lost("the server sent the answer to another request")
        return found[0]

    def _do(self, *command: str) -> Any:
        """Run one command. As a script, because an answer without the number of its request could be that to another
        one.
        """
        return self._run_here("command", command)

    def _values(self, *keys: str) -> list[str | None]:
        found: list[str | None] = self._do("MGET", *(self._prefix + key for key in keys))
        return found

    def _error_of(self, error: Exception) -> RunGuardError:
        if is_read_only(error):  # a replica now: the next call looks for the primary
            self._client.connection_pool.disconnect()
            if self._link is not None:
                self._link.disconnect()
        return store_error_of(error, self._name, self._prefix)

    def close(self) -> None:
        link, self._link = getattr(self, "_link", None), None
        if link is not None:
            link.disconnect()
            self._client.connection_pool.release(link)
        self._client.close()


@cache
def script_of(name: str) -> tuple[bytes, bytes]:
    """The digest and the text of a script."""
    folder = files("runguard.ledger") / "scripts"
    if name in _WHOLE:
        text = (folder / f"{name}.lua").read_text(encoding="utf-8")
        return _named(f"local SCHEMA = '{SCHEMA_VERSION}'\n{text}".encode())
    used = _USES.get(name, ())
    common, own, *parts = ((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name, *used))
    functions = "".join(f"local function {part}(ARGV)\n{text}\nend\n" for part, text in zip(used, parts, strict=True))
    source = (
        f"local SCHEMA = '{SCHEMA_VERSION}'\n{common}\n{functions}local function answer()\n{own}\nend\nreturn "
        f"{{ answer(), NUMBER }}\n"
    ).encode()
    return _named(source)


def _named(source: bytes) -> tuple[bytes, bytes]:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode(), source


def _warn_once(name: str, text: str) -> None:
    if name not in _warned:
        _warned.add(name)
        _log.warning("runguard.store_unsure: %s", text)
