"""Redis or Valkey: many machines share one server. Every operation is one Lua script, so that it is one step and one
round trip.

All keys begin with ``{namespace}:``. The braces make it the hash tag of every key: in a cluster a namespace lives in
one slot and thus on one node, and a reservation over many accounts stays one atomic step. It also means that a
namespace is as fast as one node; teams that need more take one namespace each. This client speaks to one server: give
it the node that owns the slot. Scripts name their keys from the prefix (``KEYS[1]``), which is all that a router needs
to find the slot.

Lua counts in doubles, which are exact up to 2**53: amounts beyond 9,007,199,254,740,991 (9.007 million dollars) are
refused.
``?timeout`` and the like are not options: every call ends within about the timeout that ``connect`` was given. Half of
it is for reaching the server, half for each answer; only the look-up of a host name is not ours to bound.
"""

import hashlib
import json
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from runguard.core.budget import NOTHING, UNLIMITED, Amount
from runguard.core.exceptions import PolicyError, RunGuardError
from runguard.ledger.identity import IDENTITY, Seen, new_id
from runguard.ledger.store import (
    SCHEMA_VERSION,
    Balance,
    Line,
    Reply,
    StoreError,
    StoreOutage,
    check_amounts,
    check_ttl,
)

MOST: Final = (1 << 53) - 1
_IDLE_S: Final = 1.0
_PEEKED: Final = 65_536
_REPEATABLE: Final = frozenset({"reserve", "settle", "release", "read", "running", "list", "about"})
RECORDS_KEPT: Final = 100_000  # of each kind, about
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
_PASSING: Final = re.compile(
    r"\b(OOM|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|LOADING|BUSY|TRYAGAIN|UNBLOCKED|UNKILLABLE)\b"
)
_OURS: Final = re.compile(r"RUNGUARD (\w+)(?:: ([^@]*?))?(?: script: .*)?$")
_LONG: Final = 1e9  # seconds: longer than anybody waits, short enough for every command
_LINES_KEPT: Final = 1_024
_AT_ONCE: Final = 500
_MOST_BATCHES: Final = 20_000
_log: Final = logging.getLogger("runguard")
_warned: Final[set[str]] = set()  # stores of this process whose settings could not be read


class RedisStore:
    """``redis://[user:password@]host[:port][/db]``, ``rediss://`` with TLS, ``unix:///path``; ``?namespace=`` keeps
    programs apart.
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
        strange = sorted(set(options) - allowed)
        if strange:
            raise PolicyError(
                f"store = {self.name!r}: option {strange[0]!r} is not one of: "
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

    def connect(self, timeout: float) -> "RedisSession":
        return RedisSession(self._url, self.name, self.namespace, timeout, self.seen)


class RedisSession:
    """One connection, made when it is needed and made again after a cut.

    Nothing is tried twice: the caller knows whether that is wise.
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
        self._known: dict[str, tuple[Line, tuple[bytes, bytes, bytes]]] = {}
        self._errors = (redis.RedisError, OSError, UnicodeDecodeError)
        self._no_script, self._cut, self._late = (
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
                # nothing here needs 3, whose greeting costs a round trip more and which some proxies do not speak
                protocol=2,
            )
        except (ValueError, TypeError, redis.RedisError) as error:
            raise PolicyError(f"store = {name!r}: {error}") from None
        self._send: Callable[..., Any] = self._client.execute_command
        self._link: Any = None  # a connection of our own for the scripts: the pool costs as much as the call itself
        self._used, self._asked = 0.0, 0
        try:
            self._check_eviction()
            self._meet() if seen.text else self._migrate()
        except BaseException:
            self.close()
            raise

    def _check_eviction(self) -> None:
        """A server that deletes keys when memory is short would forget what was spent,
        or that a side effect was done.
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
        """The server's limit of memory and what it does at the limit; None where this user may not ask."""
        for command, *rest in (("INFO", "memory"), ("CONFIG GET", "maxmemory*")):
            try:
                told = {str(name).replace("-", "_"): value for name, value in self._send(command, *rest).items()}
            except self._errors as error:
                known = self._told(error)
                if isinstance(known, StoreOutage) or command.split(" ")[0] not in str(error).upper():
                    raise known from error
                continue  # this user may not ask, or the command has another name here
            limit, policy = int(told.get("maxmemory") or 0), str(told.get("maxmemory_policy") or "")
            if "maxmemory" in told and (policy or not limit):
                return limit, policy
        return None

    def _meet(self) -> None:
        """Look which store this is. Nothing is made, should it be another one than before."""
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

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _run(self, script: str, *args: str | bytes) -> Any:
        try:
            return self._run_here(script, args)
        except _AnotherStoreError:
            self._meet()  # raises, unless this one was adopted
            return self._run_here(script, args)

    def _run_here(self, script: str, args: tuple[str | bytes, ...]) -> Any:
        try:
            try:
                return self._call(script, args)
            except self._cut:
                if script not in _REPEATABLE:
                    raise
                # on a new connection; whether or not it was heard before, it counts once
                return self._call(script, args)
        except self._errors as error:
            raise self._told(error) from error

    def _call(self, script: str, args: tuple[str | bytes, ...]) -> Any:
        """One run of a script. Its answer ends with a number that only this request has: the answer to another one is
        never taken for it.
        """
        sha, source = _script(script)
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
            return self._straight(_command(b"EVALSHA", sha, *tail), number)
        except self._no_script:  # a server that was restarted, or is another one
            return self._straight(_command(b"EVAL", source, *tail), number)

    def _straight(self, command: bytes, number: bytes) -> Any:
        """One command on our own connection. After a pause it is looked at first: a server may have closed it
        meanwhile.

        After an error the connection is closed, whatever the error is: what comes next on it may belong to this
        request.
        """
        link, now = self._link, time.monotonic()
        if link is None:
            link = self._link = self._client.connection_pool.get_connection()
        elif now - self._used > _IDLE_S:
            try:
                gone = link.can_read()  # nothing is owed to us: whatever can be read is the end
            except self._errors:
                gone = True
            if gone:
                link.disconnect()
        self._used = now
        link.send_packed_command((command,))  # connects if need be
        try:
            return self._answer(link, number)
        except TimeoutError:
            link.disconnect()
            raise self._late("Timeout reading from socket") from None
        except OSError as error:
            link.disconnect()
            raise self._cut(f"Error while reading from socket: {error}") from None
        except BaseException:  # also an interrupt: this answer must not become the next one's
            link.disconnect()
            raise

    def _answer(self, link: Any, number: bytes) -> Any:
        sock = getattr(link, "_sock", None)
        if type(sock) is socket.socket:  # with TLS nothing can be looked at before it is taken
            # Most answers are one text, and the client's parser takes longer for it than the server did. Any other is
            # left where it is, for the parser.
            seen, end = sock.recv(_PEEKED, socket.MSG_PEEK), b"\r\n$%d\r\n%b\r\n" % (len(number), number)
            if seen.startswith(b"*2\r\n$") and seen.endswith(end):
                size, _, text = seen[5 : -len(end)].partition(b"\r\n")
                if size.isdigit() and len(text) == int(size):
                    sock.recv(len(seen))
                    return text.decode()
        found = link.read_response()
        if type(found) is not list or len(found) != 2 or found[1] != number.decode():
            raise self._cut("the server sent the answer to another request")
        return found[0]

    def _do(self, *command: Any) -> Any:
        try:
            return self._send(*command)
        except self._errors as error:
            raise self._told(error) from error

    def _values(self, *keys: str) -> list[str | None]:
        found = self._do("MGET", *(self._prefix + key for key in keys))
        if type(found) is not list or len(found) != len(keys):
            raise StoreOutage(f"{self._name}: the server sent the answer to another request")
        return found

    def _told(self, error: Exception) -> RunGuardError:
        """Errors of the server and of the way to it in our terms: what may pass, and what somebody must repair."""
        from redis import exceptions

        name, text = self._name, str(error)
        ours = _OURS.search(text)
        if ours is not None:
            return self._refused(ours[1], ours[2] or "")
        if isinstance(
            error,
            exceptions.AuthenticationError
            | exceptions.AuthorizationError
            | exceptions.AuthenticationWrongNumberOfArgsError,
        ):
            return StoreError(f"{name}: the server refuses the user name or password of the URL, or wants one")
        if isinstance(error, exceptions.NoPermissionError):
            return StoreError(
                f"{name}: {text}; this user needs the keys ~{self._prefix}* and +@read +@write +@scripting +info"
            )
        if isinstance(error, exceptions.MovedError):
            return StoreError(
                f"{name}: a cluster, and {error.node_addr} has this namespace; give the address of that node"
            )
        passing = (
            exceptions.ReadOnlyError
            | exceptions.OutOfMemoryError
            | exceptions.ClusterDownError
            | exceptions.TryAgainError
            | exceptions.AskError
        )
        if isinstance(error, passing) or (isinstance(error, exceptions.ResponseError) and _PASSING.search(text)):
            if isinstance(error, exceptions.ReadOnlyError) or "READONLY" in text:
                self._client.connection_pool.disconnect()  # a replica now: the next call looks for the primary
                if self._link is not None:
                    self._link.disconnect()
            return StoreOutage(f"{name}: {text}")
        if (
            isinstance(
                error, exceptions.ConnectionError | exceptions.TimeoutError | exceptions.InvalidResponse | OSError
            )
            or "Protocol error" in text
        ):
            return StoreOutage(f"{name}: {text or type(error).__name__}")
        if "WRONGTYPE" in text:
            return StoreError(
                f"{name}: a key that begins with {self._prefix} is not of the right type: something else uses "
                "it; choose another ?namespace=name"
            )
        if "unknown command" in text.lower():
            return StoreError(f"{name}: {text}; a server with Lua scripts is needed: Redis 6.2 or later, or Valkey")
        if isinstance(error, UnicodeDecodeError):
            return StoreError(
                f"{name}: a key that begins with {self._prefix} holds what is no text; something else uses it; "
                "choose another ?namespace=name"
            )
        return StoreError(f"{name}: {text}")

    def _refused(self, kind: str, text: str) -> RunGuardError:
        match kind:
            case "schema":
                return StoreError(
                    f"{self._name}: the version of its schema changed while it was in use: a newer RunGuard "
                    "works with it. Upgrade runguard-agents"
                )
            case "identity":
                return _AnotherStoreError(f"{self._name}: another store answers here")
            case "damaged":
                return StoreError(
                    f"{self._name}: an account or a hold is damaged: something else writes keys that begin "
                    f"with {self._prefix}"
                )
            case "amount":
                return StoreError(f"{self._name}: an amount was refused: {text}")
        return StoreError(f"{self._name}: refused by a script: {kind} {text}".rstrip())

    def _amount(self, amount: Amount) -> str:
        check_amounts(amount)
        if max(amount) > MOST:
            raise StoreError(
                f"{self._name}: {max(amount)} is more than a Redis store can count exactly ({MOST}, or "
                "$9,007,199.25); use another store"
            )
        usd, tokens, calls = amount
        return f"{usd} {tokens} {calls}"

    def _lines(self, lines: Sequence[Line]) -> list[bytes]:
        """The arguments of lines. A run asks for the same ones again and again."""
        args: list[bytes] = []
        for line in lines:
            known = self._known.get(line.key)
            if known is None or (known[0] is not line and known[0] != line):
                if len(self._known) >= _LINES_KEPT:
                    self._known.clear()
                known = self._known[line.key] = line, self._packed(line)
            args += known[1]
        return args

    def _packed(self, line: Line) -> tuple[bytes, bytes, bytes]:
        check_amounts(NOTHING, (line,))
        for cap in line.caps:
            if MOST < cap < UNLIMITED:
                raise StoreError(
                    f"{self._name}: the cap {cap} of {line.scope} is more than a Redis store can count exactly "
                    f"({MOST}, or $9,007,199.25); "
                    "lower it, leave it out, or use another store"
                )
        usd, tokens, calls = ("-" if cap >= UNLIMITED else cap for cap in line.caps)
        text = f"{_moment(line.begins)} {_moment(line.ends)} {usd} {tokens} {calls} {line.window or ''}"
        return line.key.encode(), line.scope.encode(), text.encode()

    def _reply(self, lines: Sequence[Line], reply: str | list[str]) -> Reply:
        if isinstance(reply, list):
            _, now, control = reply[0].split(" ")
            return Reply(_full(reply, 1), float(now), int(control))
        head, *rows = reply.split("\n")
        answer, now, control = head.split(" ")
        balances = [
            _balance(line.key, line.scope, line.window, line.ends, row)
            for line, row in zip(lines, rows, strict=False)
            if row
        ]
        return Reply(balances, float(now), int(control), answer == "yes", answer == "stale")

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> Reply:
        check_ttl(ttl)
        if len(lines) > 1:
            lines = list({line.key: line for line in lines}.values())
        reply = self._run(
            "reserve", hold, self._amount(want), _seconds(ttl), "1" if force else "0", *self._lines(lines)
        )
        return self._reply(lines, reply)

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount) -> Reply:
        return self._reply(lines, self._run("settle", hold, self._amount(actual), *self._lines(lines)))

    def release(self, hold: str) -> Reply:
        return self._reply((), self._run("release", hold))

    def extend(self, line: Line, more: Amount) -> Balance:
        numbers = self._run("extend", self._amount(more), *self._lines((line,)))
        return _balance(line.key, line.scope, line.window, line.ends, numbers)

    def read(self, scope: str | None = None) -> list[Balance]:
        which = ("all", "") if scope is None else ("one", scope)
        for _ in range(_MOST_BATCHES):
            charged, *keys = self._run("list", *which)
            if charged == "0":
                break
        balances: list[Balance] = []
        for start in range(0, len(keys), _AT_ONCE):
            balances += _full(self._run("read", *keys[start : start + _AT_ONCE]), 0)
        return sorted(balances, key=lambda balance: balance.key)

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        return bool(self._run("mark", key, mark, json.dumps([percent, *limit])))

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        found: dict[str, tuple[float, Amount]] = {}
        for mark, text in self._do("HGETALL", f"{self._prefix}m:{key}").items():
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
        return float(f"{seconds}.{micros:06d}")

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        self._run("append", kind, ref, text, str(RECORDS_KEPT))

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        if count <= 0:
            return []
        found = self._do("XREVRANGE", f"{self._prefix}r:{kind}", "+", "-", "COUNT", count)
        return [(float(fields["at"]), fields["ref"], fields["text"]) for _, fields in reversed(found)]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        ids = self._do("LRANGE", f"{self._prefix}i:{len(kind.encode())}:{kind}:{ref}", 0 if last is None else -last, -1)
        found: list[str] = []
        for start in range(0, len(ids), _AT_ONCE):
            found += self._run("about", kind, *ids[start : start + _AT_ONCE])
        return [(float(at), text) for at, text in zip(found[::2], found[1::2], strict=True)]

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        return int(self._run("beat", run, json.dumps([worker, text]), "1" if ended else "0"))

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        found = self._run("running", _seconds(within))
        runs = []
        for run, beat, facts in zip(found[::3], found[1::3], found[2::3], strict=True):
            worker, text = json.loads(facts)
            runs.append((run, worker, float(beat), text))
        return runs

    def claim(self, key: str, ttl: float) -> str:
        return str(self._run("claim", key, _seconds(ttl)))

    def finish(self, key: str, done: bool) -> None:
        self._run("finish", key, "1" if done else "0")

    def purge(self, older_than: float) -> None:
        old = _moment(self.now() - float(_seconds(older_than)))
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

    def close(self) -> None:
        link, self._link = getattr(self, "_link", None), None
        if link is not None:
            link.disconnect()
            self._client.connection_pool.release(link)
        self._client.close()


class _AnotherStoreError(StoreOutage):
    """A script found another identity than the one that this process has seen, and changed nothing."""


@cache
def _script(name: str) -> tuple[bytes, bytes]:
    """The digest and the text of a script."""
    folder = files("runguard.ledger") / "scripts"
    common, own = ((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name))
    source = (
        f"local SCHEMA = '{SCHEMA_VERSION}'\n{common}\nlocal function answer()\n{own}\nend\nreturn "
        f"{{ answer(), NUMBER }}\n"
    ).encode()
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode(), source


def _warn_once(name: str, text: str) -> None:
    if name not in _warned:
        _warned.add(name)
        _log.warning("runguard.store_unsure: %s", text)


def _command(*parts: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(parts), b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]))


def _host(host: str, port: int | None) -> str:
    host = unquote(host)
    return f"{f'[{host}]' if ':' in host else host}:{port or 6379}"


def _seconds(seconds: float) -> str:
    if math.isnan(seconds):
        raise ValueError("a duration must be a number")
    return format(max(-_LONG, min(seconds, _LONG)), ".6f")


def _moment(at: float | None) -> str:
    if at is None:
        return "-"
    if not math.isfinite(at):
        raise ValueError(f"{at!r} is no moment")
    text = repr(float(at))
    return text if "e" not in text else format(at, ".6f")


def _balance(key: str, scope: str, window: str | None, ends: float | None, text: str) -> Balance:
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


def _full(reply: list[str], start: int) -> list[Balance]:
    rows = (reply[at : at + 5] for at in range(start, len(reply), 5))
    return [
        _balance(key, scope, window or None, None if ends == "-" else float(ends), numbers)
        for key, scope, window, ends, numbers in rows
    ]
