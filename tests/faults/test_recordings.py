"""Recordings with random damage through ``runguard replay`` and ``runguard calibrate``: no traceback, one line, a known
exit code.

A few hundred files by default. ``RUNGUARD_FAULTS=long`` tries many more, and ``RUNGUARD_FAULTS_SEED`` others.
"""

import copy
import gzip
import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runguard.cli.main import main
from tests.kit.recordings import adk_database

SEED = int(os.environ.get("RUNGUARD_FAULTS_SEED", "1"))
RECORDED = Path(__file__).parents[1] / "replay" / "recorded" / "recorded.jsonl"
USAGE = {"prompt_token_count": 100, "candidates_token_count": 10, "total_token_count": 110}
DEEP = ["[" * 3_000, "[" * 900 + "]" * 900, '{"a":' * 3_000 + "1" + "}" * 3_000]
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    10**400,
    -(10**400),
    1e308,
    float("nan"),
    float("inf"),
    2**64,
    1e15,
    "x",
    "",
    "\x00",
    "\ud800",
]
ODD += [
    "9" * 5_000,
    [],
    {},
    [None],
    {"a": 1},
    [[1]],
    {"parts": 3},
    "2026-01-01",
    "0001-01-01T00:00:00",
    "9999-12-31T23:59:59-23:59",
    "a" * 10_000,
]
COMMANDS = [
    ["replay"],
    ["replay", "--json"],
    ["replay", "--html", "page.html"],
    ["replay", "--explain", "s1", "--json"],
    ["calibrate"],
    ["calibrate", "--json"],
]


def _event(author: str, part: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "e",
        "invocation_id": "i1",
        "author": author,
        "content": {"parts": [part]},
        "timestamp": 1.0,
        "actions": {},
        **more,
    }


def _session() -> dict[str, Any]:
    events = [_event("user", {"text": "go"})]
    for number in range(4):
        call = {"id": f"c{number}", "name": "look", "args": {"at": "it"}}
        events.append(_event("a", {"function_call": call}, usage_metadata=USAGE, model_version="gemini-2.5-flash"))
        events.append(_event("a", {"function_response": {**call, "response": {"seen": 1}}}))
    return {"id": "s1", "app_name": "shop", "user_id": "u1", "state": {}, "events": events}


def _eval_set() -> dict[str, Any]:
    call = {"id": "c", "name": "look", "args": {"at": "it"}}
    data = {"tool_uses": [call], "tool_responses": [{**call, "response": {"seen": 1}}]}
    turn = {
        "invocation_id": "i1",
        "user_content": {"parts": [{"text": "go"}]},
        "final_response": {"parts": [{"text": "done"}]},
        "intermediate_data": data,
    }
    return {"eval_set_id": "e", "name": "e", "eval_cases": [{"eval_id": "s1", "conversation": [turn, turn]}]}


def _sessions_database(path: Path) -> None:
    adk_database(path, _session()["events"])


def _own_store(path: Path) -> None:
    steps: list[dict[str, Any]] = [{"k": "start", "t": 1.0, "app": "shop", "user": "u1", "session": "s1", "p": 1}]
    for number in range(1, 5):
        steps.append({"k": "ask", "t": 1.0, "l": "", "a": "a", "n": number, "model": "gpt-4o", "in": 100, "max": 10})
        steps.append({"k": "paid", "t": 1.0, "n": number, "in": 100, "out": 10, "model": "gpt-4o", "nano": 5})
        steps.append(
            {
                "k": "call",
                "t": 1.0,
                "l": "",
                "a": "a",
                "tool": "look",
                "call": "aa",
                "id": f"c{number}",
                "b": "1",
                "once": "bb",
            }
        )
        answer = {"tool": "look", "call": "aa", "id": f"c{number}", "as": "ok", "answer": 1, "chars": 4, "once": "bb"}
        steps.append({"k": "answers", "t": 1.0, "l": "", "a": "a", "b": "1", "of": [answer], "news": number == 1})
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE accounts (key TEXT)")
        db.execute("CREATE TABLE records (ref TEXT, kind TEXT, at REAL, text TEXT, seq INTEGER PRIMARY KEY)")
        insert = "INSERT INTO records (ref, kind, at, text) VALUES (?, ?, 1.0, ?)"
        db.execute(insert, ("s1", "steps", json.dumps(steps)))
        db.execute(insert, ("s2", "run", json.dumps({"app": "shop"})))
        db.execute(
            insert, ("s2", "call", json.dumps({"id": "1", "input": 100, "output": 10, "model": "gpt-4o", "agent": "a"}))
        )


# ---- damage ---------------------------------------------------------------------------------------------------------


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*above, key)
        yield from _places(entry, (*above, key))


def _odd(value: Any, chance: random.Random) -> bytes:
    """JSON with other values, without some, or nested deeply."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 2, 4])):
        if not (places := list(_places(value))):
            break
        *above, last = chance.choice(places)
        holder = value
        for key in above:
            holder = holder[key]
        if chance.random() < 0.8:
            holder[last] = copy.deepcopy(chance.choice(ODD))
        else:
            del holder[last]
    text = json.dumps(value, ensure_ascii=chance.random() < 0.7)
    if chance.random() < 0.1:
        text = text.replace('"look"', chance.choice(DEEP), 1)
    if chance.random() < 0.05:
        text = text.replace("1", "1" * chance.choice([400, 5_000]), 1)
    return text.encode("utf-8", "surrogatepass")


def _torn(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, lost, doubled or cut off."""
    torn = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 10, 60])):
        at, size = chance.randrange(len(torn) + 1), chance.choice([1, 4, 50, 1_000])
        change = chance.randrange(5)
        if change == 0:
            torn[at : at + size] = chance.randbytes(min(size, 50))
        elif change == 1:
            del torn[at : at + size]
        elif change == 2:
            torn[at:at] = chance.choice([b"[", b"{", b'"', b"\n", b"\x00", b"1e999", b"NaN", b"\xff\xfe", b"\\ud800"])
        elif change == 3:
            torn[at:at] = torn[: min(size, at)]
        elif torn:
            torn[at % len(torn)] ^= 1 << chance.randrange(8)
    return bytes(torn[: chance.randrange(len(torn) + 1)] if chance.random() < 0.2 else torn)


def _odd_rows(make: Callable[[Path], None], path: Path, chance: random.Random) -> None:
    make(path)
    with sqlite3.connect(path) as db:
        for _ in range(chance.choice([1, 2, 5])):
            table = chance.choice(
                [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            )
            column = chance.choice([row[1] for row in db.execute(f"PRAGMA table_info({table})")])
            texts = [
                (row, text)
                for row, text in db.execute(f"SELECT rowid, {column} FROM {table}")
                if isinstance(text, str) and text[:1] in ("[", "{")
            ]
            if texts and chance.random() < 0.7:
                row, text = chance.choice(texts)
                db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (_odd_text(text, chance), row))
            elif column != "seq":
                value = chance.choice(
                    [
                        None,
                        1,
                        2.5,
                        1e400,
                        b"\xff\xfe",
                        b"",
                        "x",
                        "\x00",
                        -1,
                        2**62,
                        "{",
                        "[]",
                        '[{"k": 5}]',
                        '[{"k": "start", "t": "x"}]',
                        *DEEP,
                    ]
                )
                db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid % ? = 0", (value, chance.choice([1, 2, 3])))


def _odd_text(text: str, chance: random.Random) -> str:
    try:
        return _odd(json.loads(text), chance).decode("utf-8", "replace")
    except (ValueError, RecursionError):  # it is broken already
        return text[: len(text) // 2]


def _damaged(folder: Path, number: int, chance: random.Random) -> Path:
    lines = RECORDED.read_bytes().splitlines(keepends=True)
    document = chance.choice([_session(), [_session()], _session()["events"], _eval_set()])
    make = chance.choice([_sessions_database, _own_store])
    kind = chance.randrange(7)
    path = folder / f"{number}{['.jsonl', '.jsonl.gz', '.jsonl', '.json', '.json.gz', '.db', '.db'][kind]}"
    if kind == 0:
        path.write_bytes(_torn(b"".join(lines), chance))
    elif kind == 1:
        path.write_bytes(_torn(gzip.compress(b"".join(lines)), chance))
    elif kind == 2:
        path.write_bytes(b"\n".join(_odd(json.loads(line), chance) for line in lines))
    elif kind == 3:
        path.write_bytes(_odd(document, chance))
    elif kind == 4:
        path.write_bytes(_torn(gzip.compress(json.dumps(document).encode()), chance))
    elif kind == 5:
        make(path)
        path.write_bytes(_torn(path.read_bytes(), chance))
    else:
        _odd_rows(make, path, chance)
    return path


# ---- what comes of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(4))
def test_no_damage_leads_to_a_traceback(
    part: int, is_long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(f"{SEED}/{part}")
    for number in range(5_000 if is_long else 60):
        path = _damaged(tmp_path, number, chance)
        name, *options = chance.choice(COMMANDS)
        done = CliRunner().invoke(main, [name, str(path), *options, "--workers", "1"])
        about = f"{path.name} of part {part}, seed {SEED}: {name} {' '.join(options)}"
        assert done.exception is None or isinstance(done.exception, SystemExit), f"{about}: {done.exception!r}"
        assert done.exit_code in ((0, 2) if name == "replay" else (0, 1, 2)), about
        if "--json" in options:
            assert (json.loads(done.stdout).get("ok") is False) == (done.exit_code == 2), about
        elif done.exit_code == 2:
            assert len(done.stderr.splitlines()) == 1, about
        path.unlink()
