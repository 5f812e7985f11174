"""Open what a user names as SOURCE: files, folders, databases and stores of recorded runs.

``open_sources`` splits each into pieces that fit into memory and can be read in another process. ``calibrate``,
``gate`` and ``cli/recordings`` call it; ``player`` reads the pieces. ``adk`` reads recordings of ADK.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final

from runguard.core.decision import printable
from runguard.core.errors import PolicyError
from runguard.core.events import Outcome
from runguard.core.identity import CHARS_PER_TOKEN, size_of, words_name
from runguard.core.money import MOST_USD, shown, stated_nano
from runguard.core.outcomes import classify
from runguard.pricing.rates import Usage
from runguard.providers.messages import TRANSFER
from runguard.replay import adk
from runguard.replay.steps import (
    DAMAGED,
    MAX_UNPACKED,
    ODD,
    Answered,
    Asked,
    Called,
    Faults,
    Passed,
    RecordedRun,
    Step,
    Turn,
    UnreadableError,
    Wrote,
    check_size,
    is_gzip,
    lines_of,
    load_json,
    open_text,
    possible,
    ranges,
    time_of,
    word,
)
from runguard.reporting.journal import KIND, Entry, check_entry, read_entries

_PART: Final = 4 * 1024 * 1024  # bytes of JSONL that one piece holds
_SESSIONS: Final = 64
_HEAD: Final = 64 * 1024  # characters
_TELLING: Final = ("events", "eval_cases", "evalCases", "appName", "app_name", "eval_set_id", "evalSetId")
_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz", ".db", ".sqlite", ".sqlite3")
_SQLITE: Final = b"SQLite format 3\x00"
_POSTGRES: Final = ("postgres", "postgresql")
_REDIS: Final = ("redis", "rediss", "valkey", "valkeys", "unix")


@dataclass(slots=True)
class Piece:
    """Part of a source, which can be sent to another process. ``size`` is its share of the progress."""

    size: int
    runs: Callable[[Faults, str], Iterator[RecordedRun]]  # given where to report faults, and the model of the runs


@dataclass(slots=True)
class Source:
    """Something to replay. ``unit`` says what its sizes count."""

    name: str
    size: int | None
    unit: str
    read: Callable[[int], Iterator[Piece]]  # given how many bytes to read of a compressed file
    max_unpacked: int = MAX_UNPACKED

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the source. An exception ends them and is reported like an unreadable record."""
        try:
            yield from self.read(self.max_unpacked)
        except Exception as error:  # a damaged file or a broken connection; each reader has its own exceptions
            yield Piece(0, partial(_broken, self.name, error_text(error)))


def open_sources(given: str, max_unpacked: int = MAX_UNPACKED) -> list[Source]:
    """Return the sources of a path, a folder or a URL; raise UnreadableError if there is nothing to replay.

    ``max_unpacked``: bytes to read of each compressed file.
    """
    try:
        found = _sources(given)
    except UnreadableError as error:
        raise UnreadableError(printable(str(error))) from None
    except Exception as error:
        raise UnreadableError(printable(f"{given}: cannot be read: {error_text(error)}")) from None
    for source in found:
        source.max_unpacked = max_unpacked
    return found


def error_text(error: Exception) -> str:
    """Return an exception as one line: its message, with its type unless it is an error about files."""
    # without the path, which the caller adds
    words = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return words if words and isinstance(error, (UnreadableError, *DAMAGED)) else f"{type(error).__name__}: {words}"


def listed(names: list[str], most: int) -> str:
    return printable(", ".join(names[:most])) + (" and others" if len(names) > most else "")


def names_of(sources: list[Source]) -> str:
    return listed([source.name for source in sources], 5)


def nothing_read(sources: list[Source], faults: Faults) -> UnreadableError:
    """Return the error of sources without a single run: one line that says why."""
    if not faults.count:
        return UnreadableError(f"{names_of(sources)}: contains no run")
    skipped = f"{faults.count} record{'s' * (faults.count != 1)} skipped"
    return UnreadableError(
        f"{names_of(sources)}: no run could be read, {skipped}; the first: {faults.first[0]}. "
        "`runguard replay --help` names what can be read"
    )


def _sources(given: str) -> list[Source]:
    scheme, mark, rest = given.partition("://")
    if mark:
        return [_of_url(given, scheme.partition("+")[0], rest)]
    path = Path(given)
    if path.is_dir():
        next(path.iterdir(), None)  # rglob is silent about a folder that it may not read
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(_SUFFIXES))
        found = [source for file in files if (source := _of_file_in_folder(file)) is not None]
        if not found:
            raise UnreadableError(f"{given}: no recording in this folder; looked for {', '.join(_SUFFIXES)}")
        return found
    if not path.is_file():
        raise UnreadableError(f"{given}: no such file")
    return [_of_file(path)]


def _of_file_in_folder(path: Path) -> Source | None:
    """Return the source, or None for a file that is not a recording; report an unreadable recording."""
    try:
        return _of_file(path)
    except UnreadableError:
        if path.name.lower().endswith((".db", ".sqlite", ".sqlite3")):
            raise
        return None


def _of_file(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            head = file.read(16)
        size = path.stat().st_size
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error_text(error)}") from None
    if head == _SQLITE:
        return _of_database(word(path.name), path)
    begin = _head(path)
    if _is_document(begin):
        return Source(
            word(path.name), size, "bytes", lambda most: iter([Piece(size, partial(adk.runs_of, path, most))])
        )
    first, broken, _ = begin.partition("\n")
    if begin.startswith("[") or (broken and begin.startswith("{") and first.strip() in ("{", "")):
        # JSON over several lines, which no JSONL is
        raise UnreadableError(f"{path}: JSON, but neither an ADK session nor an eval set nor lines of runs")
    return Source(word(path.name), size, "bytes", partial(_jsonl_pieces, path))


def _head(path: Path) -> str:
    """Return how a file begins; nothing where it is damaged there."""
    try:
        with open_text(path) as file:
            return file.read(_HEAD).lstrip()
    except DAMAGED:
        return ""


def _is_document(head: str) -> bool:
    """Return whether a file begins like one of ADK's documents rather than like lines of runs."""
    if head.startswith("["):
        return any(f'"{name}"' in head for name in ("events", "author", "conversation"))
    if not head.startswith("{"):
        return False
    first = head.partition("\n")[0]
    try:
        whole = load_json(first)
    except ValueError:
        whole = None
    if isinstance(whole, dict):  # one line is one object: a run, or a session written without breaks
        return "steps" not in whole and any(name in whole for name in _TELLING)
    if '"steps"' in first and len(first) < len(head):
        return False
    return any(f'"{name}"' in head for name in _TELLING) and '"steps"' not in head


def _of_database(name: str, where: adk.Where) -> Source:
    """Return the sessions of ADK in a database, or the records of a RunGuard store."""
    is_file = isinstance(where, Path)
    try:
        tables = adk.tables_of(where)
        if {"events", "sessions"} <= tables.keys():
            adk.check_columns(tables)
            size = sum(1 for _ in adk.sessions_of(where)) if is_file else None
            return Source(name, size, "sessions", partial(_session_pieces, where))
        if {"records", "accounts"} <= tables.keys():
            return _store(name, partial(database_records, where))
    except (UnreadableError, sqlite3.Error) as error:
        raise UnreadableError(f"{where if is_file else name}: {error}") from None
    raise UnreadableError(f"{where if is_file else name}: neither an ADK session database nor a RunGuard store")


def _of_url(given: str, scheme: str, rest: str) -> Source:
    if scheme == "sqlite":
        if not rest:
            raise UnreadableError(f"{given}: names no file")
        return _of_file(Path(rest.removeprefix("/")))
    if scheme in _POSTGRES:
        return _of_database(_without_password(scheme, rest), given)
    if scheme in _REDIS:
        name = _without_password(scheme, rest)
        if not is_redis_store(given):
            raise UnreadableError(f"{name}: no RunGuard store in this namespace; add ?namespace=name to use another")
        return _store(name, partial(redis_records, given))
    raise UnreadableError(
        f"{scheme}://…: cannot be replayed; use a file, a folder, sqlite:///path, postgresql://… or redis://…"
    )


def _without_password(scheme: str, rest: str) -> str:
    """Return the URL without the password, which may be before the host or in the options."""
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _store(name: str, runs: Callable[[Faults, str], Iterator[RecordedRun]]) -> Source:
    """Return a RunGuard store as a source of one piece."""
    return Source(name, 1, "stores", lambda _: iter([Piece(1, runs)]))


def _session_pieces(where: adk.Where, _: int) -> Iterator[Piece]:
    """Yield the sessions of a database of ADK, some at a time."""
    found = adk.sessions_of(where)
    while some := list(islice(found, _SESSIONS)):
        yield Piece(len(some), partial(adk.runs_in, where, some))


def _jsonl_pieces(path: Path, max_unpacked: int) -> Iterator[Piece]:
    if not is_gzip(path):
        for start, end in ranges(path, _PART):
            yield Piece(end - start, partial(_part_runs, path, start, end))
        return
    faults = Faults()
    held: list[tuple[int, bytes]] = []
    size = 0
    packed = path.stat().st_size
    for begins, line in lines_of(path, faults, max_unpacked=max_unpacked):
        held.append((begins, line))
        size += len(line)
        if size >= _PART:
            yield Piece(0, partial(_unpacked_runs, path.name, held, faults.taken()))
            held, size = [], 0
    # the progress within a compressed file is unknown until its end
    yield Piece(packed, partial(_unpacked_runs, path.name, held, faults))


# ---- the runs of a piece: functions of this module, because another process can import those


def _part_runs(path: Path, start: int, end: int, faults: Faults, model: str) -> Iterator[RecordedRun]:
    """Bytes of a plain JSONL file."""
    return _of_lines(lines_of(path, faults, start, end), path.name, faults)


def _unpacked_runs(
    name: str, lines: list[tuple[int, bytes]], found: Faults, faults: Faults, model: str
) -> Iterator[RecordedRun]:
    """Decompressed lines of a compressed file."""
    faults.merge(found)
    return _of_lines(iter(lines), name, faults)


def _broken(name: str, why: str, faults: Faults, model: str) -> Iterator[RecordedRun]:
    """Return no runs for the rest of a source that cannot be read, and note why."""
    faults.add(name, f"cannot be read to its end: {why}")
    return iter(())


def _of_lines(lines: Iterator[tuple[int, bytes]], name: str, faults: Faults) -> Iterator[RecordedRun]:
    for begins, line in lines:
        where = f"{name} at byte {begins}"
        run = read_line(line, where, faults)
        if run is not None:
            faults.in_a_row = 0
            yield run
        elif faults.give_up(where):
            return


# ---- the neutral JSONL: one run per line, of any framework
# A line is ``{"id", "steps": [...]}``, optionally with ``source, model, task, success, capped, labels, total_cost_usd,
# app, user, session``. A step has ``kind`` (message, model, tool_call, tool_result, error), ``agent``, ``tool``,
# ``args``, ``result``, ``text`` and, when known, ``call_id``, ``error``, ``branch``, ``input_tokens``,
# ``output_tokens``, ``cached_tokens``, ``usd``, ``ts``, ``text_chars``, ``result_chars``. A line without steps belongs
# to a plain log.

_ENOUGH: Final = 64_000_000
_KINDS: Final = ("model", "tool_call", "tool_result", "message", "error")  # a broken kind may not be hashable


def read_line(line: bytes, where: str, faults: Faults) -> RecordedRun | None:
    """Return the run of one line; None if it cannot be read, with the reason added to ``faults``."""
    try:
        run = load_json(line)
    except ValueError as error:
        faults.add(where, f"not valid JSON: {error}")
        return None
    if isinstance(run, dict) and is_plain(run):
        return plain_run(run, where, faults)
    if not isinstance(run, dict) or not isinstance(run.get("steps"), list):
        faults.add(where, "no run: expected an object with a list of steps, or with usd, tokens or calls")
        return None
    return run_of(run, where, faults)


def run_of(run: dict[str, Any], where: str, faults: Faults) -> RecordedRun:
    name = word(run.get("id")) or word(run.get("session")) or where
    return RecordedRun(
        name,
        Translation(run, name, f"{where} ({name})", faults).steps(),
        app=word(run.get("app")),
        user=word(run.get("user")),
        session=word(run.get("session")) or name,
        source=word(run.get("source")),
        success=_flag(run.get("success")),
        capped=_flag(run.get("capped")),
    )


class Translation:
    """The steps of one run, one at a time. Every value of a step is one that each rule and each table can handle."""

    def __init__(self, run: dict[str, Any], name: str, where: str, faults: Faults) -> None:
        self._run, self._name, self._where, self._faults = run, name, where, faults
        self._model = word(run.get("model"))
        self._open: list[tuple[Any, str, str, str]] = []  # calls without an answer: their own id, tool, agent, ours
        self._calls = self._turns = self._history = 0
        given = run["steps"]
        self._sizes = False  # some prompts are not reported, and sizes are counted for them
        for step in given:
            if step.__class__ is dict and step.get("kind") == "model" and not step.get("input_tokens"):
                self._sizes = True
                break

    def steps(self) -> Iterator[Step]:
        given = self._run["steps"]
        opened = any(isinstance(s, dict) and s.get("kind") == "message" and s.get("agent") == "user" for s in given[:3])
        # A message without a time: the run began no later than the first recorded time.
        began = None
        for step in given:
            ts = step.get("ts") if step.__class__ is dict else None
            if ts is not None and (began := time_of(ts)) is not None:
                break
        if not opened:  # the recording does not contain the user's message
            self._history += _length(self._run.get("task")) if self._sizes else 0
            yield Turn(began)
        for position, step in enumerate(given):
            if step.__class__ is not dict or step.get("kind") not in _KINDS:
                self._faults.add(f"{self._where} step {position}", "no step: an object with a known kind is expected")
                continue
            kind = step["kind"]
            agent = word(given_agent) if (given_agent := step.get("agent")) else ""
            if kind == "message":
                if self._sizes:
                    self._history += _size(step)
                if agent == "user":
                    self._open.clear()
                    at = time_of(step.get("ts"))
                    said = step.get("text")
                    yield Turn(began if at is None else at, text=said if said.__class__ is str else "")
            elif agent == "user":
                continue  # a simulated customer's own calls
            elif kind == "model":
                yield self._asked(step, agent, given, position)
            elif kind == "tool_call":
                yield self._called(step, agent)
            else:
                answered = self._answered(step, kind)
                if answered is not None:
                    yield answered

    def _asked(self, step: dict[str, Any], agent: str, given: list[Any], position: int) -> Asked:
        self._turns += 1
        following = given[position + 1] if position + 1 < len(given) else None
        goes_on = (
            isinstance(following, dict)
            and following.get("kind") == "tool_call"
            and (following.get("agent") or "") == agent
        )
        text = "" if goes_on else step.get("text")
        final = text if text.__class__ is str else ""  # an empty one may not have been kept
        # Zero is not reported, but for the output of a prompt that was.
        prompt, output = _count(step.get("input_tokens")) or None, _count(step.get("output_tokens"))
        output = None if prompt is None and not output else output
        estimated = prompt is None
        if self._sizes:
            size = _size(step)
            if prompt is None:
                answer = size + self._called_size(given, position + 1)
                prompt, output = (
                    self._history // CHARS_PER_TOKEN,
                    output if output is not None else answer // CHARS_PER_TOKEN,
                )
            self._history += size
        usage = Usage(prompt or 0, output or 0)
        if "cached_tokens" in step:
            usage.cached = min(_count(step["cached_tokens"]) or 0, usage.input)
        model = word(step["model"]) or self._model if "model" in step else self._model
        asked = Asked(
            time_of(ts) if (ts := step.get("ts")) is not None else None,
            agent,
            word(branch) if (branch := step.get("branch")) else "",
            model,
            possible(usage, self._name, self._faults),
            estimated,
            str(self._turns),
            words_name(final) if final else 0,
            goes_on,
            text=final,
        )
        if "usd" in step:
            try:
                asked.nano = nano_of(step["usd"])
            except ValueError as error:
                self._faults.add(f"{self._where} step {position}", f"{error}; the price list is used instead")
        return asked

    @staticmethod
    def _called_size(given: list[Any], position: int) -> int:
        size = 0
        while (
            position < len(given) and isinstance(given[position], dict) and given[position].get("kind") == "tool_call"
        ):
            size += size_of(given[position].get("args"), _ENOUGH)
            position += 1
        return size

    def _called(self, step: dict[str, Any], agent: str) -> Step:
        tool, args = word(step.get("tool")) or "None", step.get("args")
        if self._sizes:
            self._history += size_of(args, _ENOUGH)
        branch = word(branch) if (branch := step.get("branch")) else ""
        at = time_of(ts) if (ts := step.get("ts")) is not None else None
        if tool == TRANSFER:
            return Passed(at, agent, branch, word(args.get("agent_name") if isinstance(args, dict) else args))
        self._calls += 1
        mine = f"call-{self._calls}"
        self._open.append((step.get("call_id"), tool, agent, mine))
        return Called(at, agent, branch, str(self._turns), mine, tool, args)

    def _answered(self, step: dict[str, Any], kind: str) -> Answered | None:
        value = step["result"] if "result" in step else step.get("text")
        if self._sizes:
            self._history += _count(step.get("result_chars")) or size_of(value, _ENOUGH)
        call_id, tool = step.get("call_id"), word(step.get("tool")) or "None"
        for place, asked in enumerate(self._open):
            if asked[0] == call_id and asked[1] == tool:
                del self._open[place]
                break
        else:
            return None  # the record holds no call for it
        outcome = None
        if kind == "error":  # raised, or no such tool: ADK reports both with another hook
            outcome = Outcome.UNKNOWN_TOOL if classify(value)[0] is Outcome.UNKNOWN_TOOL else Outcome.ERROR
        elif step.get("error"):
            outcome = Outcome.FAILED
        # ADK wraps every other value in this way before a hook sees it.
        given = value if isinstance(value, dict) or outcome is not None else {"result": value}
        at = time_of(ts) if (ts := step.get("ts")) is not None else None
        return Answered(at, asked[2], asked[3], tool, given, outcome)


def _size(step: dict[str, Any]) -> int:
    return _count(step.get("text_chars")) or _length(step.get("text"))


def _length(value: Any) -> int:
    return len(value) if value.__class__ is str else 0 if value is None else size_of(value, _ENOUGH)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    if value.__class__ is int and value >= 0:
        return int(value)
    return int(value) if isinstance(value, float) and 0 <= value < 1e15 else None


# ---- a plain log: one JSON object per run with what it took in all, and no steps
# A line is ``{"usd", "tokens", "calls"}``, at least one of them, optionally with ``id``, ``ok`` (or ``success``),
# ``model``, ``source``, ``app``, ``user``, ``session``.

TOTALS: Final = ("usd", "tokens", "calls")
_COLUMNS: Final = {"usd": "usd", "tokens": "tokens", "calls": "model_calls"}  # what ``RecordedRun.unknown`` calls them
_NEVER: Final = frozenset({"tool_calls", "seconds", "largest_answer"})
_MOST_CALLS: Final = 100_000
_MOST_TOKENS: Final = 10**15


def is_plain(run: dict[str, Any]) -> bool:
    return "steps" not in run and any(run.get(name) is not None for name in TOTALS)


def plain_run(run: dict[str, Any], where: str, faults: Faults) -> RecordedRun | None:
    """Return the run of one line; None if a field is invalid, with the reason added to ``faults``."""
    name = word(run.get("id")) or word(run.get("session")) or where
    ok = run.get("ok", run.get("success"))
    try:
        if ok is not None and not isinstance(ok, bool):
            raise ValueError(f"ok = {shown(ok)}: expected true or false; leave it out where it is not known")
        nano, tokens, calls = (
            nano_of(run.get("usd")),
            _total(run, "tokens", _MOST_TOKENS),
            _total(run, "calls", _MOST_CALLS),
        )
    except ValueError as error:
        faults.add(where, str(error))
        return None
    unknown = _NEVER.union(_COLUMNS[total] for total in TOTALS if run.get(total) is None)
    return RecordedRun(
        name,
        _shares(word(run.get("model")), nano, tokens, 1 if calls is None else calls),
        app=word(run.get("app")),
        user=word(run.get("user")),
        session=word(run.get("session")) or name,
        source=word(run.get("source")),
        success=ok,
        unknown=unknown,
    )


def nano_of(value: object) -> int | None:
    """Dollars as nano-USD, rounded up; ValueError says what is wrong with them."""
    if value is None:
        return None
    nano = stated_nano(value)
    if nano is None:
        raise ValueError(f"usd = {shown(value)}: expected dollars from 0 to {MOST_USD:,}")
    return nano


def _total(run: dict[str, Any], name: str, most: int) -> int | None:
    value = run.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or value != int(value):
        raise ValueError(f"{name} = {shown(value)}: expected a whole number from 0 to {most:,}")
    return int(value)


def _shares(model: str, nano: int | None, tokens: int | None, calls: int) -> Iterator[Step]:
    """As many model calls as the run made, each with its share of the totals; the last one has the rest."""
    yield Turn(None)
    for n in range(calls):
        is_last = n == calls - 1
        usd = None if nano is None else nano // calls + (nano % calls if is_last else 0)
        prompt = 0 if tokens is None else tokens // calls + (tokens % calls if is_last else 0)
        yield Asked(None, "", "", model, Usage(prompt), batch=str(n), goes_on=not is_last, nano=usd, is_share=True)


# ---- RunGuard's own records in a store: the journal of each run, from which every rule can be judged again
# If the journal was purged, what each model call took is left: enough for money, tokens, calls, growth and time.

_ROWS: Final = "SELECT ref, kind, at, text FROM {} WHERE kind IN ('call', 'run', 'steps') ORDER BY ref, seq"
_AT_ONCE: Final = 1_000
Row = tuple[str, str, float, str]


def database_records(where: adk.Where, faults: Faults, model: str) -> Iterator[RecordedRun]:
    """Yield the runs of a RunGuard store. Its records name their models."""
    name, table = (where.name, "records") if isinstance(where, Path) else ("records", _table_of(where))
    with adk.opened(where) as ask:
        yield from _stored_runs(ask(_ROWS.format(table)), name, faults)


def _table_of(url: str) -> str:
    schema = adk.without_schema(url)[1]
    if not schema.replace("_", "").isalnum():
        raise UnreadableError("a schema's name has letters, digits and underscores")
    return f'"{schema}".records'


def is_redis_store(url: str) -> bool:
    """Whether a Redis or Valkey namespace is one of our stores. Connecting as a store would make one."""
    with _redis(url) as (server, prefix):
        return bool(server.exists(f"{prefix}schema"))


def redis_records(url: str, faults: Faults, model: str) -> Iterator[RecordedRun]:
    """Yield the records of a server by run. A temporary SQLite database sorts them, so that memory stays bounded."""
    with closing(sqlite3.connect("")) as spool:
        spool.execute("CREATE TABLE records (ref TEXT, kind TEXT, at REAL, text TEXT, seq INTEGER PRIMARY KEY)")
        with _redis(url) as (server, prefix):
            for kind in ("run", "call", KIND):
                spool.executemany(
                    "INSERT INTO records (ref, kind, at, text) VALUES (?, ?, ?, ?)",
                    _redis_rows(server, f"{prefix}r:{kind}", kind),
                )
        yield from _stored_runs(spool.execute(_ROWS.format("records")), "records", faults)


def _redis_rows(server: Any, stream: str, kind: str) -> Iterator[Row]:
    after = "-"
    while page := server.xrange(stream, after, "+", _AT_ONCE):
        for place, fields in page:
            yield fields["ref"], kind, float(fields["at"]), fields["text"]
            after = f"({place}"


@contextmanager
def _redis(url: str) -> Iterator[tuple[Any, str]]:
    """Open a plain connection that writes nothing; give it and the prefix of our keys."""
    try:
        import redis

        from runguard.ledger.redis import RedisStore
    except ImportError:
        raise UnreadableError(
            "a Redis or Valkey store needs the redis package: pip install 'runguard-agents[redis]'"
        ) from None
    try:
        store = RedisStore(url)
        server: Any = redis.Redis.from_url(
            store._url, decode_responses=True, protocol=2, socket_timeout=10, socket_connect_timeout=10
        )
    except (PolicyError, ValueError) as error:
        raise UnreadableError(str(error)) from None
    with closing(server):
        try:
            yield server, f"{{{store.namespace}}}:"
        except (redis.RedisError, KeyError, ValueError) as error:  # the last two: what is in those keys is not ours
            raise UnreadableError(f"{store.name}: cannot be read: {type(error).__name__}: {error}") from None


def _stored_runs(rows: Any, where: str, faults: Faults) -> Iterator[RecordedRun]:
    for name, group in groupby(rows, lambda row: row[0]):
        calls: dict[str, tuple[float, dict[str, Any]]] = {}
        facts: dict[str, Any] = {}
        journal: list[Entry] = []
        pieces = 0
        for place, (_, kind, at, text) in enumerate(group):
            try:
                if kind == KIND:
                    check_size(text)
                    piece = read_entries(text)
                    number = piece[0].get("p") if piece else None
                    if number not in (1, pieces + 1):
                        faults.add(
                            f"{where} ({name})", "a piece of the journal is missing: what follows is judged without it"
                        )
                    pieces = number if isinstance(number, int) else pieces
                    journal += piece
                    continue
                record, moment = load_json(text), float(at)
                if not isinstance(record, dict):
                    raise TypeError("no object")
            except ODD as error:
                faults.add(f"{where} ({name})", f"a record cannot be read: {error}")
                continue
            if kind == "run":
                facts = record
            else:  # a later record with the same id replaces the earlier
                calls[word(record.get("id")) or str(place)] = (moment, record)
        if journal and journal[0]["k"] == "start":
            facts, steps = journal[0], _journal_steps(journal, f"{where} ({name})", faults)
        else:
            steps = _call_steps(word(name), list(calls.values()), faults)
        yield RecordedRun(
            word(name), steps, word(facts.get("app")), word(facts.get("user")), word(facts.get("session")), source=where
        )


def _journal_steps(journal: list[Entry], where: str, faults: Faults) -> Iterator[Step]:
    for entry in journal:
        try:
            check_entry(entry)
        except ValueError as error:
            faults.add(where, str(error))
        else:
            yield Wrote(entry.get("t"), entry)


def _call_steps(name: str, calls: list[tuple[float, dict[str, Any]]], faults: Faults) -> Iterator[Step]:
    yield Turn(calls[0][0] if calls else None, name)
    for at, record in calls:
        if record.get("kind") == "tool":
            nano = stated_nano(record.get("usd")) or 0
            entry = {"k": "tool_paid", "id": "", "tool": word(record.get("tool")), "nano": nano}
            yield Wrote(at, {**entry, "estimated": bool(record.get("estimated"))})
            continue
        usage = Usage(
            input=_positive(record.get("input")),
            output=_positive(record.get("output")),
            cached=_positive(record.get("cached")),
            searches=_positive(record.get("searches")),
        )
        agent, model = word(record.get("agent")), word(record.get("model"))
        taken = possible(usage, name, faults)
        yield Asked(at, agent, "", model, taken, bool(record.get("estimated")), goes_on=True)


def _positive(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
