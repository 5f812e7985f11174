"""Readers: what can be replayed, what is broken and counted, what is refused."""

import asyncio
import gzip
import itertools
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runguard.policy import Policy
from runguard.replay import RunResult, UnreadableError, open_sources, replay
from runguard.replay.steps import Faults, JsonStream, TruncatedError, lines_of, ranges
from tests.kit.recordings import FIXTURES, adk_database, early, looping, working


def results(source: Path | str, **options: Any) -> tuple[list[RunResult], Faults]:
    found: list[RunResult] = []
    faults = Faults()
    for batch in replay(open_sources(str(source)), [early()], **options):
        found += [run for (run,) in batch.results]
        faults.merge(batch.faults)
    return found, faults


def write_lines(path: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def rules(runs: list[RunResult]) -> dict[str, str | None]:
    return {run.id: stop.rule if (stop := run.first("stop")) is not None else None for run in runs}


# ---- JSONL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz", "odd.name"])
def test_lines_plain_or_compressed(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, looping("a"), working("b"))
    if name == "odd.name":
        path = write_lines(path, looping("a"), working("b"))
    runs, faults = results(path)
    assert rules(runs) == {"a": "repetition", "b": None}
    assert faults.count == 0


def test_broken_lines_are_told_with_their_place_and_skipped(tmp_path: Path) -> None:
    first = json.dumps(looping("a"))
    path = write_lines(tmp_path / "runs.jsonl", first, "{not json", "[]", '{"id": "c"}', "", working("b"), first[:200])
    runs, faults = results(path)
    assert list(rules(runs)) == ["a", "b"]
    assert faults.count == 4
    assert faults.first[0].startswith(f"runs.jsonl at byte {len(first) + 1}: not valid JSON")


def test_a_compressed_file_that_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "runs.jsonl.gz", *(working(f"r{n}", 30) for n in range(50)))
    path.write_bytes(path.read_bytes()[:-200])
    runs, faults = results(path)
    assert len(runs) > 10
    assert faults.count >= 1
    assert "damaged or cut off" in " ".join(faults.first)


def test_parts_of_a_file_hold_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join("x" * (n % 37) + f"{n}\n" for n in range(500)))
    whole = [line for _, line in lines_of(path, Faults())]
    for size in (1, 2, 7, 64, 1_000, 10**6):
        parts = [line for start, end in ranges(path, size) for _, line in lines_of(path, Faults(), start, end)]
        assert parts == whole


def test_many_processes_say_the_same_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runguard.replay import sources

    path = write_lines(tmp_path / "runs.jsonl", *((looping if n % 3 else working)(f"r{n}") for n in range(60)))
    alone, _ = results(path)
    monkeypatch.setattr(sources, "_PART", 20_000)
    together, faults = results(path, workers=2)
    assert [run.to_dict() for run in together] == [run.to_dict() for run in alone]
    assert faults.count == 0


def test_recorded_fixtures_replay() -> None:
    """Three short recordings from public repositories; licence and origin stand in each record."""
    runs, faults = results(FIXTURES / "recorded.jsonl")
    assert faults.count == 0
    assert len(runs) == 3
    assert {run.success for run in runs} == {True, False}
    assert {rule for rule in rules(runs).values() if rule} == {"repetition"}


def test_a_folder_is_all_recordings_in_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", looping("a"))
    (tmp_path / "below").mkdir()
    write_lines(tmp_path / "below" / "b.jsonl.gz", working("b"))
    (tmp_path / "labels.json").write_text('[{"id": 1}]')
    (tmp_path / "notes.txt").write_text("not a recording")
    runs, faults = results(tmp_path)
    assert rules(runs) == {"a": "repetition", "b": None}
    assert faults.count == 0


@pytest.mark.parametrize("given", ["nowhere.jsonl", "redis://host/0", "sqlite://"])
def test_what_cannot_be_replayed_is_said(given: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        open_sources(given)


# ---- ADK's JSON -----------------------------------------------------------------------------------------------------


numbers = itertools.count(1)


def event(author: str, *parts: dict[str, Any], at: float = 0.0, **more: Any) -> dict[str, Any]:
    content = {"role": "user" if author == "user" else "model", "parts": list(parts)}
    return {
        "id": f"e{next(numbers)}",
        "invocation_id": "i1",
        "author": author,
        "content": content,
        "timestamp": at,
        "actions": {},
        **more,
    }


USAGE = {"prompt_token_count": 100, "candidates_token_count": 10, "total_token_count": 110}


def session(times: int = 8) -> dict[str, Any]:
    events = [event("user", {"text": "go"})]
    for turn in range(times):
        call = {"id": f"c{turn}", "name": "look", "args": {"at": "it"}}
        events.append(event("a", {"function_call": call}, usage_metadata=USAGE, model_version="gemini-2.5-flash"))
        events.append(event("a", {"function_response": {"id": f"c{turn}", "name": "look", "response": {"seen": 1}}}))
    return {"id": "s1", "app_name": "shop", "user_id": "u1", "state": {}, "events": events, "last_update_time": 9.0}


def camel(value: Any, inside: bool = False) -> Any:
    """As REST and ``adk web`` write it; arguments and answers are the user's own and stay."""
    if isinstance(value, list):
        return [camel(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {_camel(key): entry if key in ("args", "response") else camel(entry) for key, entry in value.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


@pytest.mark.parametrize("shape", [lambda s: s, camel, lambda s: [s], lambda s: [camel(s)], lambda s: s["events"]])
@pytest.mark.parametrize("indent", [None, 2])
def test_exported_sessions_in_every_shape(tmp_path: Path, shape: Callable[..., Any], indent: int | None) -> None:
    path = tmp_path / "session.json"
    path.write_text(json.dumps(shape(session()), indent=indent))
    (run,), faults = results(path)
    assert faults.count == 0
    assert (run.model_calls, run.tool_calls, run.prompt_tokens, run.output_tokens) == (8, 8, 800, 80)
    assert run.first("stop").rule == "repetition"  # type: ignore[union-attr]
    assert run.usd is not None


def test_a_session_that_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    whole = json.dumps(session(times=12))
    path = tmp_path / "session.json"
    path.write_text(whole[: len(whole) * 3 // 4])
    (run,), faults = results(path)
    assert faults.count == 1
    assert run.id == "s1"
    assert 5 < run.model_calls < 12


def test_broken_events_are_counted_and_skipped(tmp_path: Path) -> None:
    told = session()
    told["events"][3:3] = [7, {"author": 5}, {"author": "a", "content": "no object"}]
    path = tmp_path / "session.json"
    path.write_text(json.dumps(told))
    (run,), faults = results(path)
    assert faults.count == 3
    assert run.model_calls == 8


@pytest.mark.parametrize("shape", [lambda s: s, camel])
def test_eval_sets(tmp_path: Path, shape: Callable[..., Any]) -> None:
    call = {"id": "c", "name": "look", "args": {"at": "it"}}
    turn = {
        "invocation_id": "i1",
        "user_content": {"parts": [{"text": "go"}]},
        "final_response": {"parts": [{"text": "done"}]},
        "intermediate_data": {
            "tool_uses": [call],
            "tool_responses": [{"id": "c", "name": "look", "response": {"seen": 1}}],
        },
        "creation_timestamp": 10.0,
    }
    newer = {
        **turn,
        "intermediate_data": {
            "invocation_events": [
                part
                for n in range(6)
                for part in (
                    {"author": "a", "content": {"parts": [{"function_call": {**call, "id": f"c{n}"}}]}},
                    {
                        "author": "a",
                        "content": {
                            "parts": [{"function_response": {"id": f"c{n}", "name": "look", "response": {"seen": 1}}}]
                        },
                    },
                )
            ]
        },
    }
    cases = [
        {"eval_id": "plain", "conversation": [turn, turn]},
        {"eval_id": "stuck", "conversation": [newer]},
        {"eval_id": "broken"},
    ]
    path = tmp_path / "cases.evalset.json"
    path.write_text(json.dumps(shape({"eval_set_id": "e", "name": "e", "eval_cases": cases})))
    runs, faults = results(path)
    assert rules(runs) == {"plain": None, "stuck": "repetition"}
    assert (runs[0].runs, runs[0].model_calls, runs[0].tool_calls) == (2, 4, 2)
    assert faults.count == 1


def test_a_json_document_is_walked_in_small_pieces(tmp_path: Path) -> None:
    import io

    class Slow(io.StringIO):
        largest = 0

        def read(self, size: int | None = -1) -> str:
            return super().read(min(size or 1, 7))

    stream = JsonStream(Slow('{"a": [1, 22, {"b": "x"}], "c": -1.5e3, "d": "end"}'))
    found: list[Any] = []
    for key in stream.members():
        if key == "a":
            found += [stream.value() for _ in stream.elements()]
        else:
            found.append(stream.value())
    assert found == [1, 22, {"b": "x"}, -1500.0, "end"]
    with pytest.raises(TruncatedError):
        for _ in JsonStream(io.StringIO('{"a" 1}')).members():
            pass


# ---- databases ------------------------------------------------------------------------------------------------------


def test_the_legacy_schema_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE sessions (app_name, user_id, id, create_time)")
        db.execute("CREATE TABLE events (id, app_name, user_id, session_id, actions BLOB, content)")
        db.execute(
            "INSERT INTO events VALUES ('e', 'a', 'u', 's', ?, '{}')", (b"cos\nsystem\n(S'touch /tmp/never'\ntR.",)
        )
    with pytest.raises(UnreadableError, match=r"legacy schema.*pickle"):
        open_sources(str(path))


def test_other_databases_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE things (id)")
    with pytest.raises(UnreadableError, match="neither an ADK session database"):
        open_sources(str(path))
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5_000)
    with pytest.raises(UnreadableError):
        open_sources(str(broken))


def test_events_keep_the_order_in_which_they_came_and_broken_ones_are_skipped(tmp_path: Path) -> None:
    events = session()["events"]
    path = adk_database(tmp_path / "session.db", [*events[:4], "{broken", "[]", *events[4:]])
    (run,), faults = results(path)
    assert (run.id, run.app, run.user, run.model_calls) == ("s1", "shop", "u1", 8)
    assert run.first("stop").rule == "repetition"  # type: ignore[union-attr]
    assert faults.count == 2
    assert results(f"sqlite:///{path}")[0][0].to_dict() == run.to_dict()


def test_a_damaged_database_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = adk_database(tmp_path / "session.db", session(times=400)["events"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 8_192] = b"\xff" * 8_192
    path.write_bytes(bytes(data))
    runs, faults = results(path)
    assert faults.count >= 1
    assert len(runs) == 1


def test_it_only_reads(tmp_path: Path) -> None:
    path = adk_database(tmp_path / "session.db", session()["events"])
    before = path.read_bytes()
    path.chmod(0o444)
    results(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["session.db"]


def test_an_answer_that_a_live_guard_refused_or_nudged_is_read_as_such(tmp_path: Path) -> None:
    told = session()
    told["events"][6]["content"]["parts"][0]["function_response"]["response"]["runguard_notice"] = "do not repeat it"
    refused = told["events"][8]["content"]["parts"][0]["function_response"]
    refused["response"] = {"status": "not_executed", "message": "Not executed: …"}
    (run,), _ = results(adk_database(tmp_path / "session.db", told["events"]))
    assert [(v.action, v.turn) for v in run.verdicts] == [("nudge", 3), ("block", 4), ("stop", 5)]


def test_own_records_show_what_money_and_growth_rules_would_do(tmp_path: Path) -> None:
    from google.adk.agents import LlmAgent

    from runguard.adk import RunGuardPlugin
    from runguard.testing import ScriptedModel, call, run

    def step(n: int) -> dict[str, int]:
        return {"n": n}

    store = tmp_path / "guard.db"
    model = ScriptedModel(
        lambda n, _: call("step", n=n) if n < 12 else __import__("runguard.testing", fromlist=["text"]).text("done")
    )
    plugin = RunGuardPlugin(store=f"sqlite:///{store}", store_timeout=30)
    asyncio.run(run(LlmAgent(name="a", model=model, tools=[step]), plugins=[plugin]))
    assert plugin.flush()
    (played,), faults = results(store)
    assert faults.count == 0
    assert (played.model_calls, played.prompt_tokens, played.app, played.session) == (12, 12_000, "app", "s1")
    (batch,) = replay(open_sources(str(store)), [Policy.validated({"max_model_calls": 5}, "")])
    assert batch.results[0][0].first("stop").rule == "model_calls"  # type: ignore[union-attr]


# ---- whatever else comes --------------------------------------------------------------------------------------------

ODD = [
    None,
    True,
    -1,
    1e400,
    "x",
    "",
    [],
    {},
    [None],
    {"parts": 3},
    {"parts": [None, 5, {"function_call": 7}]},
    "2026-01-01",
    float("nan"),
]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_no_value_in_any_field_ends_a_replay(tmp_path: Path, odd: Any) -> None:
    fields = {name for step in looping()["steps"] for name in step} | {
        "branch",
        "text_chars",
        "result_chars",
        "cached_tokens",
        "model",
    }
    lines = []
    for name in sorted(fields - {"kind"}):
        run = looping(f"odd-{name}")
        for step in run["steps"]:
            step[name] = odd
        lines.append(run)
    lines += [
        {**looping(f"run-{name}"), name: odd}
        for name in ("source", "model", "task", "success", "capped", "app", "user", "session")
    ]
    runs, faults = results(write_lines(tmp_path / "runs.jsonl", *lines))
    assert len(runs) + faults.count >= len(lines)

    names = (
        "id",
        "invocation_id",
        "author",
        "content",
        "timestamp",
        "actions",
        "usage_metadata",
        "branch",
        "model_version",
        "node_info",
        "custom_metadata",
    )
    for number, name in enumerate(names):
        told = session(4)
        for entry in told["events"]:
            entry[name] = odd
        adk_database(tmp_path / f"{number}.db", told["events"])
    for number in range(len(names)):
        results(tmp_path / f"{number}.db")
