"""Redis or Valkey as a store: many machines share one server. ``ledger/memory`` opens it for its URL.

Every operation is one Lua script (``scripts/*.lua``), so that it is one step and one round trip. ``RedisStore`` reads
the URL, ``RedisConnection`` runs scripts, ``RedisSession`` has the operations. ``replay/sources`` reads
journals from it, ``view/store`` asks what the server loses in a crash.
"""

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from runguard.core.errors import PolicyError, RunGuardError
from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.ledger import (
    IDENTITY,
    SCHEMA_VERSION,
    Balance,
    Line,
    Record,
    Seen,
    SettledCall,
    StoreDeniedError,
    StoreError,
    StoreOutage,
    StoreReply,
    check_amounts,
    check_ttl,
    check_version,
    new_id,
)

# ---- Redis errors as store errors: an outage may pass by itself, an error needs a repair.

_TRANSIENT: Final = re.compile(
    r"\b(OOM|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|LOADING|BUSY|TRYAGAIN|UNBLOCKED|UNKILLABLE)\b"
)
_DENIED: Final = re.compile(r"\b(NOAUTH|WRONGPASS|DENIED)\b")
_NO_RIGHT: Final = re.compile(r"\bNOPERM\b|ACL failure in script")
_OURS: Final = re.compile(r"RUNGUARD (\w+)(?:: ([^@]*?))?(?: script: .*)?$")


class OtherIdentityError(StoreOutage):
    """A script found another identity than the one this process has seen. It changed nothing."""


def store_error_of(error: Exception, name: str, prefix: str) -> RunGuardError:
    """Return the store error for an error of the server or of the connection to it."""
    from redis import exceptions

    text = str(error)
    ours = _OURS.search(text)
    if ours is not None:
        return _refusal_of_script(name, prefix, ours[1], ours[2] or "")
    if isinstance(
        error,
        exceptions.AuthenticationError
        | exceptions.AuthorizationError
        | exceptions.AuthenticationWrongNumberOfArgsError,
    ) or (isinstance(error, exceptions.ResponseError) and _DENIED.search(text)):
        return StoreDeniedError(
            f"{name}: the server wants another user name or password; write redis://:password@host or "
            "redis://user:password@host, with %40 for an @"
        )
    if isinstance(error, exceptions.NoPermissionError) or _NO_RIGHT.search(text):
        return StoreDeniedError(
            f"{name}: {text}; this user needs the keys ~{prefix}* and +@read +@write +@scripting +info"
        )
    if isinstance(error, exceptions.MovedError):
        host, port = error.node_addr
        return StoreError(f"{name}: a cluster, and {host}:{port} has this namespace; give the address of that node")
    transient = (
        exceptions.ReadOnlyError
        | exceptions.OutOfMemoryError
        | exceptions.ClusterDownError
        | exceptions.TryAgainError
        | exceptions.AskError
    )
    if isinstance(error, transient) or (isinstance(error, exceptions.ResponseError) and _TRANSIENT.search(text)):
        return StoreOutage(f"{name}: {text}")
    if (
        isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | exceptions.InvalidResponse | OSError)
        or "Protocol error" in text
    ):
        return StoreOutage(f"{name}: {text or type(error).__name__}")
    if "WRONGTYPE" in text:
        return StoreError(
            f"{name}: a key that begins with {prefix} is not of the right type: something else uses "
            "it; choose another ?namespace=name"
        )
    if "unknown command" in text.lower():
        return StoreError(f"{name}: {text}; a server with Lua scripts is needed: Redis 6.2 or later, or Valkey")
    if isinstance(error, UnicodeDecodeError):
        return StoreError(
            f"{name}: a key that begins with {prefix} holds bytes that are not text: something else uses it; "
            "choose another ?namespace=name"
        )
    return StoreError(f"{name}: {text}")


def _refusal_of_script(name: str, prefix: str, kind: str, text: str) -> RunGuardError:
    match kind:
        case "schema":
            return StoreError(
                f"{name}: the version of its schema changed while it was in use: a newer RunGuard "
                "works with it. Upgrade runguard-agents"
            )
        case "identity":
            return OtherIdentityError(f"{name}: another store answers here")
        case "damaged":
            return StoreError(
                f"{name}: an account or a hold is damaged: something else writes keys that begin with {prefix}"
            )
        case "amount":
            return StoreError(f"{name}: an amount was refused: {text}")
    return StoreError(f"{name}: refused by a script: {kind} {text}".rstrip())


# ---- Values as they travel to and from the Redis server: times, commands, rows of accounts.

_LONGEST_S: Final = 1e9  # longer than anybody waits, short enough for every command


def command_of(*parts: bytes) -> bytes:
    """Return a command in Redis' protocol."""
    return b"*%d\r\n%b" % (len(parts), b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]))


def seconds_text(seconds: float) -> str:
    if math.isnan(seconds):
        raise ValueError("a duration must be a number")
    return format(max(-_LONGEST_S, min(seconds, _LONGEST_S)), ".6f")


def moment_text(at: float | None) -> str:
    if at is None:
        return "-"
    if not math.isfinite(at):
        raise ValueError(f"{at!r} is not a moment")
    text = repr(float(at))
    return text if "e" not in text else format(at, ".6f")


def balance_of(key: str, scope: str, window: str | None, ends: float | None, text: str) -> Balance:
    n = text.split(" ")
    usd, tokens, calls = n[:3]
    caps = (
        UNLIMITED if usd == "-" else int(usd),
        UNLIMITED if tokens == "-" else int(tokens),
        UNLIMITED if calls == "-" else int(calls),
    )
    spent, held = (int(n[3]), int(n[4]), int(n[5])), (int(n[6]), int(n[7]), int(n[8]))
    if len(n) == 9:
        return Balance(key, scope, window, ends, caps, spent, held)
    granted, overrun, expired = ((int(n[at]), int(n[at + 1]), int(n[at + 2])) for at in (9, 12, 15))
    return Balance(key, scope, window, ends, caps, spent, held, granted, overrun, expired, n[18] == "1")


def balances_of(reply: list[str], start: int) -> list[Balance]:
    rows = (reply[at : at + 5] for at in range(start, len(reply), 5))
    return [
        balance_of(key, scope, window or None, None if ends == "-" else float(ends), numbers)
        for key, scope, window, ends, numbers in rows
    ]


# ---- One connection to a Redis or Valkey server: running scripts on it, and checking what server it is.

_IDLE_S: Final = 1.0
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

    Only scripts that may run twice are repeated; the caller decides about the others. Every call ends within about the
    timeout. Half of it is for reaching the server, half for each answer; only looking up a host name cannot be limited.

    All keys begin with ``{namespace}:``. The braces make it the hash tag of every key: in a cluster a namespace lives
    in one slot, so on one node, and a reservation over many accounts stays one atomic step. It also means that a
    namespace is as fast as one node; teams that need more use one namespace each. Scripts build their keys from the
    prefix (``KEYS[1]``), which is all that a router needs to find the slot.
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
        self._no_script, self._lost = redis.exceptions.NoScriptError, redis.exceptions.ConnectionError
        self._read_only = redis.exceptions.ReadOnlyError
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
        # one connection for the scripts: taking it from the pool each time costs as much as a call
        self._link: Any = None
        self._used, self._asked = 0.0, 0
        try:
            self._check_eviction()
            self._meet() if seen.text else self._open_store()
        except BaseException:
            self.close()
            raise

    def _check_eviction(self) -> None:
        """Refuse a server that deletes keys when memory is short.

        It would forget what was spent, or that a side effect was done. Raise StoreError for such a server; only warn
        when this user may not ask.
        """
        found = self._memory_settings()
        if found is None:
            if self._name not in _warned:
                _warned.add(self._name)
                _log.warning(
                    "runguard.store_unsure: %s: this user may use neither INFO nor CONFIG GET, so it is not known "
                    "whether the server deletes keys when memory is short. "
                    "Check that its maxmemory-policy is noeviction, or allow the command with +info",
                    self._name,
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
        """Return the server's memory limit and what it does at the limit; None where this user may not ask."""
        for command, part in (("INFO", "memory"), ("CONFIG GET", "maxmemory*")):
            settings = self._server_settings(command, part)
            limit, policy = int(settings.get("maxmemory") or 0), str(settings.get("maxmemory_policy") or "")
            if "maxmemory" in settings and (policy or not limit):
                return limit, policy
        return None

    def forgets_in_a_crash(self) -> bool | None:
        """Return whether the server keeps no append-only file.

        Then a crash loses what was booked since its last snapshot. None where this user may not ask.
        """
        kept = self._server_settings("INFO", "persistence").get("aof_enabled")
        if kept is None:
            kept = {"yes": 1, "no": 0}.get(str(self._server_settings("CONFIG GET", "appendonly").get("appendonly")))
        return None if kept is None else not int(kept)

    def _server_settings(self, command: str, part: str) -> dict[str, Any]:
        """Return settings of the server by name; none where this user may not ask, or the command has another name."""
        try:
            return {str(name).replace("-", "_"): value for name, value in self._send(command, part).items()}
        except self._errors as error:
            known = self._error_of(error)
            is_away = isinstance(known, StoreOutage) and not isinstance(known, StoreDeniedError)
            if is_away or command.split(" ")[0] not in str(error).upper():
                raise known from error
            return {}

    def _meet(self) -> None:
        """Find out which store this is. Create nothing, in case it is another one than before."""
        expected = self._seen.text
        version, identity = self._values("schema", f"t:{IDENTITY}")
        self._seen.meet(expected, identity or "")
        self._check(version or "")

    def _open_store(self) -> None:
        version, identity = self._run("open", new_id())
        self._check(version)
        self._seen.meet(self._seen.text, identity)

    def _check(self, version: str) -> None:
        found = f"schema version {version}" if version else "it holds data and no schema version"
        foreign = f"this namespace belongs to something else ({found}); choose another with ?namespace=name"
        check_version(self._name, int(version) if version.isdecimal() else 0, foreign)

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
        """Run a script once.

        Its answer ends with the number of this request, so that the answer to another request is never taken for it.
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
                gone = link.can_read()  # no answer is due, so anything that can be read ends the connection
            except self._errors:
                gone = True
            if gone:
                link.disconnect()
        self._used = now
        link.send_packed_command((command,))  # connects if necessary
        try:
            found = link.read_response()
            if type(found) is not list or len(found) != 2 or found[1] != number.decode():
                raise self._lost("the server sent the answer to another request")
        except BaseException:  # also an interrupt: this answer must not be read as the next one's
            link.disconnect()
            raise
        return found[0]

    def _do(self, *command: str) -> Any:
        """Run one command as a script, because a plain answer has no number and could be that to another request."""
        return self._run_here("command", command)

    def _values(self, *keys: str) -> list[str | None]:
        found: list[str | None] = self._do("MGET", *(self._prefix + key for key in keys))
        return found

    def _error_of(self, error: Exception) -> RunGuardError:
        # a replica now: the next call looks for the primary
        if isinstance(error, self._read_only) or "READONLY" in str(error):
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
    """Return the digest and the text of a script."""
    folder, used = files("runguard.ledger") / "scripts", _USES.get(name, ())
    common, own, *parts = ((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name, *used))
    functions = "".join(f"local function {part}(ARGV)\n{text}\nend\n" for part, text in zip(used, parts, strict=True))
    if name not in _WHOLE:
        own = f"{common}\n{functions}local function answer()\n{own}\nend\nreturn {{ answer(), NUMBER }}\n"
    source = f"local SCHEMA = '{SCHEMA_VERSION}'\n{own}".encode()
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode(), source


# ---- All operations of a Redis or Valkey store: on accounts, marks, documents, records and claims, and the purge.

MOST_EXACT: Final = (1 << 53) - 1  # Lua counts in doubles
_AT_ONCE: Final = 500
_MOST_BATCHES: Final = 20_000
RECORDS_KEPT: Final = 100_000  # of each kind, about
_LINES_KEPT: Final = 1_024
_UNUSUAL: Final = 100


class RedisSession(RedisConnection):
    """One connection with all operations of ``StoreSession``."""

    def __init__(self, url: str, name: str, namespace: str, timeout: float, seen: Seen) -> None:
        super().__init__(url, name, namespace, timeout, seen)
        self._known: dict[str, tuple[Line, tuple[bytes, bytes, bytes]]] = {}
        self._unusual = 0  # calls to make before the script for the usual case is tried again

    def _amount(self, amount: Amount) -> str:
        check_amounts(amount)
        if max(amount) > MOST_EXACT:
            raise StoreError(
                f"{self._name}: {max(amount)} is more than a Redis store can count exactly ({MOST_EXACT}, or "
                "$9,007,199.25); use another store"
            )
        usd, tokens, calls = amount
        return f"{usd} {tokens} {calls}"

    def _lines(self, lines: Sequence[Line]) -> list[bytes]:
        return [part for line in lines for part in self._packed_line(line)]

    def _packed_line(self, line: Line) -> tuple[bytes, bytes, bytes]:
        """Return the arguments of a line. They are cached, because a run uses the same lines again and again."""
        known = self._known.get(line.key)
        if known is None or (known[0] is not line and known[0] != line):
            if len(self._known) >= _LINES_KEPT:
                self._known.clear()
            known = self._known[line.key] = line, self._packed(line)
        return known[1]

    def _packed(self, line: Line) -> tuple[bytes, bytes, bytes]:
        check_amounts(NOTHING, (line,))
        for cap in line.caps:
            if MOST_EXACT < cap < UNLIMITED:
                raise StoreError(
                    f"{self._name}: the cap {cap} of {line.scope} is more than a Redis store can count exactly "
                    f"({MOST_EXACT}, or $9,007,199.25); "
                    "lower it, leave it out, or use another store"
                )
        usd, tokens, calls = ("-" if cap >= UNLIMITED else cap for cap in line.caps)
        text = f"{moment_text(line.begins)} {moment_text(line.ends)} {usd} {tokens} {calls} {line.window or ''}"
        return line.key.encode(), line.scope.encode(), text.encode()

    def _reply(self, lines: Sequence[Line], reply: str | list[str]) -> StoreReply:
        if isinstance(reply, list):
            _, now, control = reply[0].split(" ")
            return StoreReply(balances_of(reply, 1), float(now), int(control))
        head, *rows = reply.split("\n")
        answer, now, control = head.split(" ")
        balances = [
            balance_of(line.key, line.scope, line.window, line.ends, row)
            for line, row in zip(lines, rows, strict=False)
            if row
        ]
        return StoreReply(balances, float(now), int(control), answer == "yes", answer == "stale")

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> StoreReply:
        lines = _each_once(lines)
        return self._reply(lines, self._run("reserve", *self._asked_for(hold, ttl, lines, want, force)))

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        return self._reply(lines, self._run("settle", *self._billed(hold, lines, actual, record)))

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        lines = _each_once(lines)
        if lines == bill.lines and lines and not force:
            usual = self._next_call(bill, hold, ttl, want)
            if usual is not None:
                return usual
        first = self._billed(bill.hold, bill.lines, bill.actual, bill.record)
        second = self._asked_for(hold, ttl, lines, want, force)
        reply = self._run("settle_and_reserve", *first, *second, str(len(first)))
        if isinstance(reply, list):
            *settled, reserved = reply
        else:
            settled, _, reserved = reply.partition("\f")
        return self._reply(bill.lines, settled), self._reply(lines, reserved)

    def _next_call(
        self, bill: SettledCall, hold: str, ttl: float, want: Amount
    ) -> tuple[StoreReply, StoreReply] | None:
        """Settle and reserve in the usual case. None: it is another case, and nothing was done."""
        if self._unusual:
            self._unusual -= 1
            return None
        check_ttl(ttl)
        record = (*bill.record, str(RECORDS_KEPT)) if bill.record is not None else ("",)
        args = (bill.hold, self._amount(bill.actual), hold, self._amount(want), seconds_text(ttl), *record)
        reply = self._run("next_call", *args, *[part for line in bill.lines for part in self._packed_line(line)[::2]])
        if not reply:
            self._unusual = _UNUSUAL
            return None
        settled, _, reserved = reply.partition("\f")
        return self._reply(bill.lines, settled), self._reply(bill.lines, reserved)

    def _asked_for(
        self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, force: bool
    ) -> tuple[str | bytes, ...]:
        check_ttl(ttl)
        return hold, self._amount(want), seconds_text(ttl), "1" if force else "0", *self._lines(lines)

    def _billed(
        self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None
    ) -> tuple[str | bytes, ...]:
        appended = (*record, str(RECORDS_KEPT)) if record is not None else ("", "", "", "")
        return hold, self._amount(actual), *appended, *self._lines(lines)

    def release(self, hold: str) -> StoreReply:
        return self._reply((), self._run("release", hold))

    def extend(self, line: Line, more: Amount) -> Balance:
        numbers = self._run("extend", self._amount(more), *self._lines((line,)))
        return balance_of(line.key, line.scope, line.window, line.ends, numbers)

    def read(self, scope: str | None = None) -> list[Balance]:
        which = ("all", "") if scope is None else ("one", scope)
        for _ in range(_MOST_BATCHES):
            charged, *keys = self._run("list", *which)
            if charged == "0":
                break
        balances: list[Balance] = []
        for start in range(0, len(keys), _AT_ONCE):
            balances += balances_of(self._run("read", *keys[start : start + _AT_ONCE]), 0)
        return sorted(balances, key=lambda balance: balance.key)

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        return bool(self._run("mark", key, mark, json.dumps([percent, *limit])))

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        found: dict[str, tuple[float, Amount]] = {}
        names_and_texts = self._do("HGETALL", f"{self._prefix}m:{key}")
        for mark, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True):
            percent, usd, tokens, calls = json.loads(text)
            found[mark] = percent, (usd, tokens, calls)
        return found

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        if marks:
            self._do("HDEL", f"{self._prefix}m:{key}", *marks)

    def get(self, name: str) -> tuple[int, str]:
        expected = self._seen.text
        identity, version, text = self._values(f"t:{IDENTITY}", f"v:{name}", f"t:{name}")
        self._seen.meet(expected, identity or "")
        if (version is None) != (text is None):
            raise StoreError(
                f"{self._name}: the document '{name}' is damaged: its version or its text is missing. Restore "
                "the store from a backup, "
                "or remove the document: runguard store repair"
            )
        return (int(version), text) if version is not None and text is not None else (0, "")

    def put(self, name: str, version: int, text: str) -> bool:
        return bool(self._run("put", name, str(version), text))

    def drop(self, name: str) -> None:
        self._do("DEL", f"{self._prefix}v:{name}", f"{self._prefix}t:{name}")

    def now(self) -> float:
        seconds, micros = self._do("TIME")
        return float(f"{seconds}.{int(micros):06d}")

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        self._run("append", kind, ref, text, str(RECORDS_KEPT))

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        if count <= 0:
            return []
        found = self._do("XREVRANGE", f"{self._prefix}r:{kind}", "+", "-", "COUNT", str(count))
        records = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in reversed(found)]
        return [(float(record["at"]), record["ref"], record["text"]) for record in records]

    def page(self, kind: str, after: str, count: int) -> list[tuple[str, float, str, str]]:
        if count <= 0:
            return []
        millis, _, number = after.partition("-")
        first = f"{millis}-{int(number) + 1}" if after else "-"  # "(" for "after" needs Redis 6.2
        found = self._do("XRANGE", f"{self._prefix}r:{kind}", first, "+", "COUNT", str(count))
        records = [(name, dict(zip(fields[::2], fields[1::2], strict=True))) for name, fields in found]
        return [(name, float(record["at"]), record["ref"], record["text"]) for name, record in records]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        since = "0" if last is None else str(-last)
        ids = self._do("LRANGE", f"{self._prefix}i:{len(kind.encode())}:{kind}:{ref}", since, "-1")
        found: list[str] = []
        for start in range(0, len(ids), _AT_ONCE):
            found += self._run("about", kind, *ids[start : start + _AT_ONCE])
        return [(float(at), text) for at, text in zip(found[::2], found[1::2], strict=True)]

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        return int(self._run("beat", run, json.dumps([worker, text]), "1" if ended else "0"))

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        found = self._run("running", seconds_text(within))
        runs = []
        for run, beat, facts in zip(found[::3], found[1::3], found[2::3], strict=True):
            worker, text = json.loads(facts)
            runs.append((run, worker, float(beat), text))
        return runs

    def claim(self, key: str, ttl: float) -> str:
        return str(self._run("claim", key, seconds_text(ttl)))

    def finish(self, key: str, done: bool) -> None:
        self._run("finish", key, "1" if done else "0")

    def purge(self, older_than: float) -> None:
        old = moment_text(self.now() - float(seconds_text(older_than)))
        for what in ("expire", "holds", "claims", "runs", "accounts", "passing"):
            self._batches(what, old)
        for kind in self._do("SMEMBERS", f"{self._prefix}kinds"):
            self._batches("records", old, kind)

    def _batches(self, what: str, old: str, kind: str = "") -> None:
        skip = 0
        for _ in range(_MOST_BATCHES):
            seen, kept = self._run("purge", what, old, str(_AT_ONCE), str(skip), kind)
            if seen < _AT_ONCE:
                return
            skip += kept


def _each_once(lines: Sequence[Line]) -> Sequence[Line]:
    return list({line.key: line for line in lines}.values()) if len(lines) > 1 else lines


# ---- The URL of a Redis or Valkey store.

_SCHEMES: Final = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_OPTIONS: Final = frozenset({"db", "client_name", "socket_keepalive"})
_TLS: Final = frozenset(
    {
        "ssl_cert_reqs",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_password",
        "ssl_check_hostname",
        "ssl_min_version",
        "ssl_ciphers",
    }
)
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,99}")


class RedisStore:
    """``redis://[user:password@]host[:port][/db]``, ``rediss://`` with TLS, or ``unix:///path``.

    ``?namespace=`` separates programs that share a server. Of a cluster, give the node that owns the namespace's slot.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise PolicyError(
                "store: this Redis URL cannot be read; write 'redis://host:6379/0?namespace=name'"
            ) from None
        if parts.scheme not in _SCHEMES:
            raise PolicyError(f"store = '{parts.scheme}://…': write redis://, rediss://, valkey:// or unix://")
        scheme = _SCHEMES[parts.scheme]
        place = parts.path if scheme == "unix" else _host(parts.hostname or "localhost", port)
        self.name = f"{parts.scheme}://{place}"
        options: dict[str, str] = {}
        for key, value in query:
            if key in options:
                raise PolicyError(f"store = {self.name!r}: option {key} is given twice")
            options[key] = value
        self.namespace = options.pop("namespace", "runguard")
        if not _NAMESPACE.fullmatch(self.namespace):
            raise PolicyError(
                f"store = {self.name!r}: namespace = {self.namespace!r}: letters, digits and _ . : / - only, "
                "at most 100"
            )
        allowed = _OPTIONS | (_TLS if scheme == "rediss" else frozenset())
        unknown = sorted(set(options) - allowed)
        if unknown:
            raise PolicyError(
                f"store = {self.name!r}: option {unknown[0]!r} is not one of: "
                f"{', '.join(sorted(allowed | {'namespace'}))}"
            )
        if scheme == "unix" and not parts.path.startswith("/"):
            raise PolicyError(f"store = {self.name!r}: write 'unix:///path/of/the.sock'")
        database = options.get("db", parts.path.strip("/") if scheme != "unix" else "") or "0"
        if not re.fullmatch(r"\d{1,5}", database):
            raise PolicyError(f"store = {self.name!r}: the database is a number, as in 'redis://host:6379/0'")
        if database != "0":
            self.name += f"/{database}" if scheme != "unix" else f"?db={database}"
        if self.namespace != "runguard":
            self.name += f"{'&' if '?' in self.name else '?'}namespace={self.namespace}"
        self.seen = Seen(self.name)
        self._url = f"{scheme}://{parts.netloc}{parts.path}?{urlencode(options)}"
        self.durable = (
            "survives the end of any client; a crash of the server loses nothing with appendfsync always, "
            "about a second with everysec, "
            "and all since the last snapshot without an append-only file; a failover loses what the replica "
            "had not yet received"
        )

    def __repr__(self) -> str:
        return f"RedisStore({self.name!r})"

    def connect(self, timeout: float) -> RedisSession:
        return RedisSession(self._url, self.name, self.namespace, timeout, self.seen)


def _host(host: str, port: int | None) -> str:
    host = unquote(host)
    return f"{f'[{host}]' if ':' in host else host}:{port or 6379}"
