"""Files that are damaged, hostile or no recordings: one line and exit code 2 where nothing can be read, and never a
traceback.
"""

import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from runguard.cli.main import main
from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.replay.steps import JsonStream, TruncatedError
from tests.kit.recordings import FIXTURES, adk_database, looping, working

from .test_sources import session

COMMANDS = [
    ("replay",),
    ("replay", "--json"),
    ("replay", "--html", "page.html"),
    ("replay", "--explain", "s1"),
    ("calibrate",),
    ("calibrate", "--json"),
]


def command(path: Path | str, name: str, *options: str) -> Result:
    done = CliRunner().invoke(main, [name, str(path), *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert "Traceback" not in done.output
    return done


def line(run: dict[str, Any]) -> bytes:
    return json.dumps(run).encode() + b"\n"


def packed(data: bytes, path: Path) -> Path:
    path.write_bytes(gzip.compress(data, 1))
    return path


# ---- nothing in it can be read --------------------------------------------------------------------------------------


def _damaged_gzip(folder: Path) -> Path:
    path = packed(FIXTURES.joinpath("recorded.jsonl").read_bytes(), folder / "runs.jsonl.gz")
    data = bytearray(path.read_bytes())
    data[12:40] = b"\xff" * 28
    path.write_bytes(data)
    return path


def _cut_gzip(folder: Path) -> Path:
    path = packed(line(looping()), folder / "runs.jsonl.gz")
    path.write_bytes(path.read_bytes()[:15])
    return path


def _false_checksum(folder: Path) -> Path:
    path = packed(json.dumps({"x": 1}).encode(), folder / "session.json.gz")
    path.write_bytes(path.read_bytes()[:-8] + b"\x00" * 8)
    return path


def _written(name: str, data: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def _damaged_database(folder: Path) -> Path:
    """Its list of sessions cannot be read."""
    path = adk_database(folder / "session.db", session()["events"])
    with sqlite3.connect(path) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(data)
    return path


def _damaged_schema(folder: Path) -> Path:
    path = adk_database(folder / "session.db", [])
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE", b"CREATE \xe1\xe1\xe1\xe1\xe1"))
    return path


def _other_columns(folder: Path) -> Path:
    with sqlite3.connect(folder / "session.db") as db:
        db.execute("CREATE TABLE sessions (app_name, user_id, id)")
        db.execute("CREATE TABLE events (app_name, user_id, session_id, timestamp, event_data)")
    return folder / "session.db"


def _folder_of_nothing(folder: Path) -> Path:
    (folder / "below" / "runs.jsonl").mkdir(parents=True)
    return folder


NOTHING: dict[str, Callable[[Path], Path]] = {
    "damaged gzip": _damaged_gzip,
    "cut gzip": _cut_gzip,
    "false checksum": _false_checksum,
    "deep array": _written("session.json", b"[" * 200_000),
    "deep object": _written("session.json", b'{"events":' * 200_000),
    "deep line": _written("runs.jsonl", b'{"id": "a", "steps": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    "long number": _written("runs.jsonl", b'{"id": ' + b"9" * 5_000 + b', "steps": []}\n'),
    "no text": _written("runs.jsonl", bytes(range(128, 256)) * 50),
    "another encoding": _written("runs.jsonl", line(looping()).decode().encode("utf-16")),
    "one key that is no text": _written("session.json", b'{\n"app_name": "x", [1]: 2}'),
    "empty": _written("runs.jsonl", b""),
    "empty gzip": _written("runs.jsonl.gz", gzip.compress(b"")),
    "empty database": _written("guard.db", b"SQLite format 3\x00"),
    "damaged database": _damaged_database,
    "damaged schema": _damaged_schema,
    "other columns": _other_columns,
    "folder": _folder_of_nothing,
    "too long a name": lambda folder: folder / ("x" * 5_000),
    "impossible name": lambda folder: folder / "a\x00b\nc.jsonl",
}


@pytest.mark.parametrize("asked", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("make", NOTHING.values(), ids=NOTHING)
def test_a_file_with_nothing_to_read_is_told_in_one_line(
    tmp_path: Path, make: Callable[[Path], Path], asked: tuple[str, ...]
) -> None:
    name, *options = asked
    done = command(make(tmp_path), name, *options)
    if name == "calibrate" and done.exit_code == 1:  # a file that holds no run advises nothing
        assert done.stdout
        return
    assert done.exit_code == 2
    if "--json" in options:
        assert json.loads(done.stdout)["ok"] is False
    else:
        (told,) = done.stderr.splitlines()
        assert told
        assert len(told) < 6_000
        assert done.stdout == ""


# ---- odd values in it -----------------------------------------------------------------------------------------------

ODD = [
    7,
    2.5,
    True,
    None,
    [],
    {},
    ["x"],
    {"a": 1},
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "\ud800",
    "\x00",
    "9999-12-31T23:59:59-23:59",
    "x" * 10_000,
]


@pytest.mark.parametrize("asked", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("odd", ODD, ids=lambda value: repr(value)[:20])
def test_ids_that_are_no_texts_and_numbers_that_are_no_counts(tmp_path: Path, odd: Any, asked: tuple[str, ...]) -> None:
    name, *options = asked
    run, told = looping(), session(4)
    for step in run["steps"]:
        step |= {"agent": odd, "ts": odd, "call_id": odd, "input_tokens": odd, "output_tokens": odd, "model": odd}
        step |= {"tool": odd} if "tool" in step else {}
    lines = [
        run,
        {**looping(), "id": odd},
        {**working(), "session": odd, "source": odd, "model": odd, "user": odd, "app": odd},
    ]
    (tmp_path / "runs.jsonl").write_bytes(b"".join(line(each) for each in lines))
    for event in told["events"]:
        event |= {"id": odd, "invocation_id": odd, "branch": odd, "timestamp": odd, "model_version": odd}
        event["usage_metadata"] = {"prompt_token_count": odd, "candidates_token_count": odd, "total_token_count": odd}
        for part in event["content"]["parts"]:
            for call in part.values():
                if isinstance(call, dict):
                    call |= {"id": odd, "name": odd}
    (tmp_path / "session.json").write_text(json.dumps({**told, "id": odd, "app_name": odd, "user_id": odd}))
    adk_database(tmp_path / "session.db", told["events"])
    with sqlite3.connect(tmp_path / "session.db") as db:
        stored = odd if isinstance(odd, int | float | None) and odd != 10**400 else b"\xff\xfe"
        db.execute("UPDATE sessions SET id = ?, user_id = ?, create_time = ?", (stored, stored, stored))
        db.execute("UPDATE events SET session_id = ?, user_id = ?, timestamp = ?", (stored, stored, stored))
    for file in ("runs.jsonl", "session.json", "session.db"):
        done = command(tmp_path / file, name, *options)
        assert done.exit_code in ((0, 2) if name == "replay" else (0, 1))
        done.stdout.encode()  # a terminal can show it
        if "--json" in options:
            json.loads(done.stdout)


def test_a_count_that_no_call_can_have_is_told_and_left_out(tmp_path: Path) -> None:
    run = looping(times=2)
    run["steps"][1]["input_tokens"] = 10**4_000
    (tmp_path / "runs.jsonl").write_bytes(line(run))
    (batch,) = replay(open_sources(str(tmp_path / "runs.jsonl")), [Policy.validated({}, "")])
    ((result,),) = batch.results
    assert (result.model_calls, result.prompt_tokens, result.estimated) == (2, 1_100, 1)
    assert batch.faults.first == ["loop: a model call reports an impossible number of tokens: ignoring them"]


# ---- some of it can be read -----------------------------------------------------------------------------------------


def test_damage_far_into_a_compressed_file_is_told(tmp_path: Path) -> None:
    """Behind the first piece that is handed over."""
    lines = b"".join(line({**working(f"run-{n}", 2), "task": f"{n * 7919:x}" * 2_000}) for n in range(600))
    path = packed(lines, tmp_path / "runs.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-2_000])
    done = command(path, "replay", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0
    assert 400 < len(told["runs"]) < 600
    assert told["skipped"]["count"] == 1
    assert "damaged or cut off" in told["skipped"]["first"][0]


def test_a_large_session_can_be_explained(tmp_path: Path) -> None:
    """Its file is still read when its run is found."""
    told = session(40)
    for event in told["events"]:
        event["custom_metadata"] = {"note": "x" * 20_000}
    (tmp_path / "session.json").write_text(json.dumps(told))
    done = command(tmp_path / "session.json", "replay", "--explain", "s1", "--json")
    assert (done.exit_code, json.loads(done.stdout)["run"]["model_calls"]) == (0, 40)


def test_sessions_before_the_damage_are_replayed(tmp_path: Path) -> None:
    path = adk_database(tmp_path / "session.db", session(3)["events"])
    with sqlite3.connect(path) as db:
        db.executemany(
            "INSERT INTO sessions VALUES ('shop', 'u1', ?, ?, 2, 2)", [(f"other-{n:05}", "x" * 500) for n in range(400)]
        )
        size, pages = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count"))
    data = bytearray(path.read_bytes())
    data[(pages - 5) * size : (pages - 3) * size] = b"\xff" * (2 * size)
    path.write_bytes(data)
    done = command(path, "replay")
    assert done.exit_code in (0, 2)
    assert "malformed" in done.output


def test_one_damaged_file_in_a_folder_is_told_and_the_others_are_replayed(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(line(looping("good")))
    _damaged_gzip(tmp_path)
    told = json.loads(command(tmp_path, "replay", "--json").stdout)
    assert [run["id"] for run in told["runs"]] == ["good"]
    assert told["skipped"]["first"][0].startswith("runs.jsonl.gz at byte 0: the file is damaged or cut off here")


# ---- more than a machine can hold -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "begin", "end", "records"),
    [
        ("runs.jsonl.gz", b"", b"", 500),  # of four calls each
        ("session.json.gz", b'{"id": "s1", "app_name": "x", "state": {}, "events": [', b"{}]}", 2_000),
    ],
)
def test_a_compressed_file_is_read_up_to_a_size(
    tmp_path: Path, name: str, begin: bytes, end: bytes, records: int
) -> None:
    record = (
        line(working("run", 4)) if name.startswith("runs") else json.dumps(session(1)["events"][1]).encode() + b",\n"
    )
    path = packed(begin + record * records + end, tmp_path / name)
    whole = json.loads(command(path, "replay", "--json").stdout)
    assert whole["totals"]["model_calls"] == 2_000
    part = json.loads(command(path, "replay", "--json", "--max-unpacked", "500KB").stdout)
    assert 0 < part["totals"]["model_calls"] < whole["totals"]["model_calls"]
    assert "read up to" in part["skipped"]["first"][0]
    assert part["skipped"]["first"][0].endswith(
        "it unpacks to more than 500 KB; raise --max-unpacked, or unpack it first"
    )
    assert command(path, "calibrate", "--max-unpacked", "500KB").exit_code in (0, 1)


@pytest.mark.parametrize("size", ["", "0", "-1", "much", "1.5.2MB", "1e9"])
def test_what_is_no_size_is_refused(tmp_path: Path, size: str) -> None:
    (tmp_path / "runs.jsonl").write_bytes(line(looping()))
    done = command(tmp_path / "runs.jsonl", "replay", "--max-unpacked", size)
    assert done.exit_code == 2
    assert "is not a size such as 500MB or 4GB" in " ".join(done.output.split())


def test_a_record_of_millions_of_values_is_not_parsed(tmp_path: Path) -> None:
    bomb = b'{"id": "bomb", "steps": [' + b"[]," * 4_100_000 + b"[]]}\n"
    path = packed(bomb + line(looping("good")), tmp_path / "runs.jsonl.gz")
    assert path.stat().st_size < 200_000
    told = json.loads(command(path, "replay", "--json").stdout)
    assert [run["id"] for run in told["runs"]] == ["good"]
    assert "a record of more than 4,000,000 values" in told["skipped"]["first"][0]
    path = packed(
        b'{"id": "s1", "app_name": "x", "state": [' + b"[]," * 4_100_000 + b'0], "events": []}',
        tmp_path / "session.json.gz",
    )
    assert "a record of more than 4,000,000 values" in command(path, "replay").stderr


def test_a_line_beyond_all_measure_is_skipped(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "runs.jsonl.gz", "wb", 1) as file:
        file.write(b'{"id": "long", "steps": [], "task": "')
        for _ in range(70):
            file.write(b"x" * 1024**2)
        file.write(b'"}\n' + line(looping("good")))
    told = json.loads(command(tmp_path / "runs.jsonl.gz", "replay", "--json").stdout)
    assert ([run["id"] for run in told["runs"]], told["skipped"]["count"]) == (["good"], 1)
    assert told["skipped"]["first"][0].endswith("a line of more than 64 MB")


@pytest.mark.parametrize("content", [b"{broken\n" * 300_000, b"\n" * 1_200_000], ids=["broken", "empty"])
def test_a_file_of_nothing_but_broken_lines_is_given_up(tmp_path: Path, content: bytes) -> None:
    path = packed(content, tmp_path / "runs.jsonl.gz")
    done = command(path, "replay")
    assert done.exit_code == 2
    count = int(done.stderr.partition("no run could be read, ")[2].split()[0])
    assert count < 11_000


def test_a_list_of_nothing_but_numbers_is_given_up(tmp_path: Path) -> None:
    path = packed(
        b'{"id": "s1", "app_name": "x", "events": [' + b"1," * 1_000_000 + b"1]}", tmp_path / "session.json.gz"
    )
    told = json.loads(command(path, "replay", "--json").stdout)
    assert told["skipped"]["count"] < 11_000


def test_spaces_are_skipped_in_one_go() -> None:
    class Spaces:
        left = 200

        def read(self, size: int) -> str:
            self.left -= 1
            return " " * 100_000 if self.left > 0 else ""

    stream = JsonStream(Spaces())  # type: ignore[arg-type]
    assert stream.peek() == ""
    with pytest.raises(TruncatedError):
        stream.value()
