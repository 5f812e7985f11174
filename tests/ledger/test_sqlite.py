"""SQLite: the file and the machine."""

import contextlib
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runguard.core.money import NOTHING
from runguard.engine.guard import Guard
from runguard.errors import PolicyError
from runguard.ledger.ledger import SCHEMA_VERSION, StoreError, StoreOutage
from runguard.ledger.sqlite import SqliteSession, SqliteStore
from runguard.policy import Policy
from tests.kit.conformance import CALL, LONG_S, Worker, a_line, an_id, calls, of, opened, the
from tests.kit.examples import each_row
from tests.kit.waiting import PATIENCE_S, at_once


@pytest.fixture
def file(path: Path) -> Iterator[SqliteSession]:
    """A session on a SQLite file in which five calls of nine are spent."""
    session = SqliteStore(f"sqlite:///{path}").connect(PATIENCE_S)
    session.settle("first", [a_line(caps=calls(9))], (5, 5, 5))
    yield session
    session.close()


@dataclass(frozen=True)
class FileAt:
    """A place, as workers need it."""

    url: str
    module: str = "runguard.ledger.sqlite"
    name: str = "SqliteStore"


def digest(path: Path) -> dict[str, bytes]:
    return {
        found.name: found.read_bytes() for found in sorted(path.parent.iterdir()) if not found.name.endswith("-shm")
    }


@each_row(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite://host/a.db",
        "sqlite:///a.db?mode=ro",
        "sqlite:///a.db?synchronous=off",
        "sqlite:///a#b.db",
        "sqlite:/absolute.db",
        "sqlite:relative.db",
    ],
)
def test_sqlite_refuses_an_address_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(PolicyError):
        SqliteStore(url)


@pytest.mark.skipif(os.name == "nt", reason="there it is a path")
@pytest.mark.parametrize(
    "path", [r"C:\Users\me\guard.db", "c:/Users/me/guard.db", r"accounts\guard.db", "C:%5Cguard.db"]
)
def test_a_path_of_windows_does_not_become_the_name_of_a_file_elsewhere(path: str) -> None:
    with pytest.raises(PolicyError, match="a path of Windows"):
        SqliteStore(f"sqlite:///{path}")


def test_a_missing_folder_is_named_and_not_created(tmp_path: Path) -> None:
    missing = tmp_path / "tpyo"
    guard = Guard(Policy.validated({"store": f"sqlite:///{missing}/guard.db"}, ""))
    with pytest.raises(PolicyError, match=f"its folder {missing} does not exist; create the folder, or name another"):
        guard.check_store()
    assert not missing.exists()


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    guard = Guard(Policy.validated({"store": f"sqlite:///{tmp_path}"}, ""))
    with pytest.raises(
        PolicyError, match=f"{tmp_path}: is a directory; name a file in it, such as sqlite:///{tmp_path}/"
    ):
        guard.check_store()


def test_sqlite_waits_for_the_disk_unless_told_otherwise(path: Path) -> None:
    """Only what was synced survives a power cut."""
    for option, level in (("", 2), ("?synchronous=full", 2), ("?synchronous=normal", 1)):
        store = SqliteStore(f"sqlite:///{path}{option}")
        with contextlib.closing(store.connect(PATIENCE_S)) as session:
            assert session._db.execute("PRAGMA synchronous").fetchone() == (level,)
        assert ("loses nothing" in store.durable) is (level == 2)


def test_a_relative_path_is_the_same_file_after_the_process_went_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next connection would find an empty ledger, with the full budget."""
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("sqlite:///here.db")
    with contextlib.closing(store.connect(PATIENCE_S)) as session:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        session.settle("h", [a_line()], CALL)
        with contextlib.closing(store.connect(PATIENCE_S)) as other:
            assert the(other).spent == CALL
    assert not list((tmp_path / "elsewhere").iterdir())


def test_workers_that_make_a_file_at_the_same_moment_all_find_their_own_schema(tmp_path: Path) -> None:
    """One of them makes it while the others look:
    they must not take the half of it that they see for somebody else's.
    """
    for turn in range(15):
        at_once(partial(lambda path, _: opened(path).close(), tmp_path / f"{turn}.db"), threads=8)


def test_a_period_begins_at_its_first_moment_and_is_over_at_its_last(
    file: SqliteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two periods that touch have no moment in common and none between them."""
    begins, ends = 1_700_000_000.0, 1_700_003_600.0
    clock = [begins - 0.001]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    line, following = a_line("p#1", begins=begins, ends=ends), a_line("p#2", begins=ends, ends=ends + 3600)
    assert file.reserve(an_id(), LONG_S, [line], CALL).stale
    clock[0] = begins
    assert file.reserve(an_id(), LONG_S, [line], CALL).ok
    assert file.reserve(an_id(), LONG_S, [following], CALL).stale
    clock[0] = ends - 0.001
    assert file.reserve(an_id(), LONG_S, [line], CALL).ok
    clock[0] = ends
    assert file.reserve(an_id(), LONG_S, [line], CALL).stale
    assert file.reserve(an_id(), LONG_S, [following], CALL).ok


def test_a_hold_is_charged_at_the_end_of_its_time_and_no_moment_before(
    file: SqliteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_700_000_000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    file.reserve("h", 60, [a_line("p#")], CALL)
    clock[0] += 59.99
    assert the(file, "p#").held == CALL
    clock[0] += 0.02
    assert the(file, "p#").expired == CALL


def test_a_connection_that_has_read_may_write_after_another_wrote(path: Path, file: SqliteSession) -> None:
    """A read that turns into a write is refused at once by SQLite, whatever the timeout."""
    with contextlib.closing(opened(path)) as other:
        for turn in range(5):
            for one, two in ((file, other), (other, file)):
                one.get("control")
                one.read()
                two.settle(an_id(), [a_line()], CALL)
                assert one.reserve(an_id(), LONG_S, [a_line(f"{turn}#")], CALL).ok
        assert the(file).spent == (5, 5, 15)


def test_a_full_disk_is_an_outage_that_leaves_the_accounts_whole(file: SqliteSession, path: Path) -> None:
    file.reserve("h", LONG_S, [a_line(caps=calls(9))], CALL)
    before, pages = the(file), file._db.execute("PRAGMA page_count").fetchone()[0]
    file._db.execute(f"PRAGMA max_page_count={pages}")  # SQLITE_FULL, as from a disk without room
    with pytest.raises(StoreOutage, match="full"):  # noqa: PT012 - how many still fit is not the subject
        for number in range(1_000):
            file.append("alert", f"{number}", "x" * 500)
    assert the(file) == before  # reading goes on
    with contextlib.closing(opened(path)) as other:
        assert the(other) == before
    file._db.execute("PRAGMA max_page_count=100000")
    assert of(file.settle("h", [a_line(caps=calls(9))], CALL)).spent == (5, 5, 6)


FILLER = """
import signal
session = store.connect(20)
session.settle("mine", [line("k#")], (1, 1, 1))
size = max(os.path.getsize(path + end) for end in ("", "-wal"))
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3 * 4096, resource.RLIM_INFINITY))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    for number in range(1_000):
        session.settle(f"fill{number}", [line("k#")], (1, 1, 1))
    say("never full")
except StoreOutage:
    say(number)
say(session.read()[0].spent[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
session.settle(f"fill{number}", [line("k#")], (1, 1, 1))
say(session.read()[0].spent[2])
"""


def test_a_write_that_the_system_cuts_short_is_an_outage_and_can_be_told_again(path: Path, file: SqliteSession) -> None:
    with Worker(FileAt(f"sqlite:///{path}"), FILLER, path=str(path)) as filler:
        booked = filler.told()
        assert isinstance(booked, int)
        assert filler.told() == 6 + booked  # all that was acknowledged, and nothing of what was not
        assert filler.told() == 7 + booked
    assert the(file).spent[2] == 7 + booked


NOT_ROOT = """
if os.geteuid() == 0:  # root may write everywhere, so somebody else tries
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""
UNPRIVILEGED = f"""{NOT_ROOT}
try:
    session = store.connect(2)
    session.settle("h", [line("k#")], (0, 0, 1))
except StoreDeniedError as error:
    say(str(error))
else:
    say("written")
"""


@pytest.mark.parametrize("what", ["writable", "folder", "file", "unreadable", "missing folder"])
def test_a_file_or_folder_without_permission_is_an_error_that_names_it(what: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, which only its owner may enter
        folder = Path(name) / "accounts"
        folder.mkdir()
        Path(name).chmod(0o755)
        path = folder / "a.db"
        opened(path).close()
        for found in folder.iterdir():
            found.chmod({"file": 0o444, "unreadable": 0o000}.get(what, 0o666))
        folder.chmod(0o555 if what in ("folder", "missing folder") else 0o777)
        target = folder / "deeper" / "a.db" if what == "missing folder" else path
        with Worker(FileAt(f"sqlite:///{target}"), UNPRIVILEGED) as somebody:
            answer = somebody.told()
        folder.chmod(0o755)
    if what == "writable":  # so the others fail for the reason that they name
        assert answer == "written"
    else:
        assert str(target) in answer
        assert "damaged" not in answer


LOCKED_OUT = f"""{NOT_ROOT}
from runguard.ledger.remote import StoreLedger
ledger = StoreLedger(store, 2.0)
account = ledger.account("k#", "user:app/ann", None, None, (UNLIMITED,) * 3)
def spend(times):
    for _ in range(times):
        ledger.settle(ledger.book([account]), (1, 1, 1))
spend(1)
say(ledger.flush(10))
while hear() == "spend":
    ledger.link.era += 1  # as after an outage: every thread opens the file again
    spend(5)
    say((ledger.flush(1), ledger.health()["lost"]))
say(ledger.flush(20))
hear()
"""


@pytest.mark.parametrize("what", ["folder", "file", "read-only"])
def test_what_was_spent_while_a_file_may_not_be_used_is_booked_later(what: str) -> None:
    modes = {"folder": 0o777, "file": 0o666, "read-only": 0o666}
    denied = {"folder": 0o000, "file": 0o000, "read-only": 0o444}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "accounts"
        folder.mkdir()
        Path(name).chmod(0o755)
        path = folder / "a.db"
        opened(path).close()

        def allow(by_kind: dict[str, int]) -> None:
            for found in [folder] if what == "folder" else folder.iterdir():
                found.chmod(by_kind[what])

        folder.chmod(0o777)
        for found in folder.iterdir():
            found.chmod(0o666)
        with Worker(FileAt(f"sqlite:///{path}"), LOCKED_OUT) as somebody:
            assert somebody.told() is True
            allow(denied)
            somebody.tell("spend")
            assert somebody.told() == (False, 0)
            allow(modes)
            somebody.tell("go on")
            assert somebody.told() is True
            with contextlib.closing(opened(path)) as session:
                assert the(session).spent == (6, 6, 6)
            somebody.tell("end")


def damaged(path: Path, how: str) -> None:
    """As a bad disk leaves it. The file has several pages, and no log beside it."""
    with contextlib.closing(opened(path)) as session:
        for number in range(200):
            session.settle(f"{number}", [a_line(f"{number}#", scope=f"s{number}")], CALL)
        session._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    assert len(content) > 8 * 4096
    if how == "header":
        content[:100] = b"\0" * 100
    elif how == "text":
        content = bytearray(b"these are not the accounts you are looking for\n" * 500)
    elif how == "pages":
        content[4096:] = os.urandom(len(content) - 4096)
    else:
        content = content[: len(content) // 2]
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["header", "text", "pages", "cut in half"])
def test_a_damaged_file_is_an_error_and_is_never_begun_anew(path: Path, how: str) -> None:
    """A store that helps itself with an empty file gives everybody the full budget again."""
    damaged(path, how)
    before = path.read_bytes()

    def work() -> None:
        with contextlib.closing(opened(path)) as session:
            session.read()
            for number in range(200):
                session.reserve(an_id(), LONG_S, [a_line(f"{number}#", scope=f"s{number}")], CALL)

    with pytest.raises(StoreError, match="damaged"):  # some damage shows when the file is opened, some when it is read
        work()
    assert path.read_bytes()[:4096] == before[:4096]
    assert len(path.read_bytes()) == len(before)


@pytest.mark.parametrize("how", ["unlinked", "replaced", "replaced by a copy"])
def test_a_file_that_goes_away_under_a_live_session_is_an_outage(path: Path, file: SqliteSession, how: str) -> None:
    """Writes into a file without a name succeed, and are lost."""
    moved = path.with_name("moved.db")
    if how == "replaced by a copy":
        shutil.copy(path, moved)
    path.unlink()
    if how == "replaced":
        opened(path).close()
    elif how == "replaced by a copy":
        moved.rename(path)
    deeds: list[Callable[[], Any]] = [
        lambda: file.reserve("h", LONG_S, [a_line()], CALL),
        lambda: file.settle("first", [a_line()], CALL),
        lambda: file.release("first"),
        lambda: file.extend(a_line(), CALL),
        lambda: file.put("control", 0, "stop"),
        lambda: file.append("alert", "r", "t"),
        lambda: file.claim("c", LONG_S),
        lambda: file.first("k#", "m", 0.5, NOTHING),
        lambda: file.beat("r", "w", "t"),
        file.read,
    ]
    for deed in deeds:
        with pytest.raises(StoreOutage):
            deed()


def test_a_file_locked_by_another_program_is_an_outage_after_the_timeout(path: Path, file: SqliteSession) -> None:
    with (
        contextlib.closing(opened(path, timeout=0.2)) as waiting,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        with pytest.raises(StoreOutage, match="locked"):
            waiting.reserve("h", LONG_S, [a_line()], CALL)
        with pytest.raises(StoreOutage, match="locked"):
            waiting.settle("h", [a_line()], CALL)
        took = time.monotonic() - began
        assert 0.3 < took < 5  # it waited, and not for ever
        other.execute("ROLLBACK")
        assert waiting.reserve("h", LONG_S, [a_line()], CALL).ok
    assert (the(file).spent, the(file).held) == ((5, 5, 5), CALL)


IN_THE_MIDDLE = """
session = store.connect(20)
with session._write():
    session._db.execute("UPDATE accounts SET spent_calls = spent_calls + 100")
    session._db.execute("DELETE FROM holds")
    say("writing")
    time.sleep(60)
"""


def test_a_worker_stopped_in_the_middle_of_a_write_is_an_outage_for_the_others_and_killed_it_leaves_nothing(
    path: Path, file: SqliteSession
) -> None:
    """A lock that dies with its process never has to be broken."""
    with contextlib.closing(opened(path, timeout=0.2)) as waiting:
        with Worker(FileAt(f"sqlite:///{path}"), IN_THE_MIDDLE) as stuck:
            assert stuck.told() == "writing"
            with pytest.raises(StoreOutage, match="locked"):
                waiting.settle("h", [a_line()], CALL)
            assert waiting.get("control") == (0, "")  # readers do not wait for writers
        # at once, with a fifth of a second's patience
        assert of(waiting.settle("h", [a_line()], CALL)).spent == (5, 5, 6)
        assert not waiting.reserve("first", LONG_S, [a_line()], CALL).ok  # the holds are all there


def test_a_call_that_fails_half_way_leaves_nothing_and_the_session_goes_on(
    file: SqliteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read()
    with monkeypatch.context() as broken:
        broken.setattr(type(file), "_control", lambda _: 1 / 0)  # the last thing a reserve and a settle do
        deeds: list[Callable[[], object]] = [
            lambda: file.reserve("h", LONG_S, [a_line("new#")], CALL),
            lambda: file.settle("first", [a_line()], (9, 9, 9)),
            lambda: file.release("h"),
        ]
        for deed in deeds:
            with pytest.raises(ZeroDivisionError):
                deed()
    assert file.read() == before
    assert file.reserve("h", LONG_S, [a_line("new#")], CALL).ok


@pytest.mark.parametrize("version", [0, 1, SCHEMA_VERSION, SCHEMA_VERSION + 1, 99])
def test_another_programs_database_is_refused_and_stays_as_it_was(path: Path, version: int) -> None:
    """Version 1 is what nearly every program writes into its first schema."""
    with contextlib.closing(sqlite3.connect(path)) as foreign:
        foreign.executescript(
            "CREATE TABLE accounts (key TEXT, balance REAL); INSERT INTO accounts VALUES ('mine', 1.5); "
            f"PRAGMA user_version={version}"
        )
    before = digest(path)
    for _ in range(2):
        with pytest.raises(StoreError, match=re.escape(str(path))):
            opened(path)
    assert digest(path) == before


def test_a_schema_of_a_newer_version_is_refused_and_stays_as_it_was(path: Path, file: SqliteSession) -> None:
    file._db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    file.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer"):
        opened(path)
    assert path.read_bytes() == before


def test_a_store_in_memory_is_refused_because_each_session_would_have_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((StoreError, PolicyError)):
        SqliteStore("sqlite:///:memory:").connect(PATIENCE_S)
