"""A session in which an invocation pauses, live under the plugin and replayed from its database: one run, and the same
decisions.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from google.adk.sessions.sqlite_session_service import SqliteSessionService

from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.testing import call, text
from tests.kit.desks import Desk, asking

from .test_same_as_live import STRICT, Listening, heard_by, replayed


def desk_at(path: Path, script: Any) -> Desk:
    _, desk = asking(script)
    desk.service = SqliteSessionService(str(path))  # type: ignore[assignment]
    return desk


async def test_a_paused_run_is_judged_as_one(tmp_path: Path) -> None:
    desk = desk_at(tmp_path / "session.db", lambda n, _: [call("look", n=1), call("ask", question="same")])
    plugin = Listening(mode="shadow", **STRICT)
    await desk.say(plugin)
    for _ in range(6):
        await desk.answer(plugin)
    mine, result = replayed(tmp_path / "session.db", **STRICT)
    assert (result.runs, result.model_calls) == (1, 7)
    assert {rule for _, _, rule, *_ in mine} >= {"model_calls", "tool_calls", "no_news"}
    assert mine == heard_by(plugin)


async def test_what_a_person_answers_is_news(tmp_path: Path) -> None:
    desk = desk_at(tmp_path / "session.db", lambda n, _: [call("look", n=1), call("ask", question="what next?")])
    policy: dict[str, Any] = {"rules": {"no_news": {"nudge": 2, "stop": 3}}}
    plugin = Listening(mode="shadow", **policy)
    await desk.say(plugin)
    for number in range(6):
        await desk.answer(plugin, {"next": f"item {number} of the list, please"})
    mine, result = replayed(tmp_path / "session.db", **policy)
    assert (result.runs, result.model_calls) == (1, 7)
    assert mine == heard_by(plugin) == Counter()


async def test_a_run_that_goes_on_after_another_message_is_judged_as_one(tmp_path: Path) -> None:
    """The user talks about something else while a question is open."""
    desk = desk_at(tmp_path / "session.db", lambda n, _: text("hello") if n in (2, 4) else call("ask", question=str(n)))
    policy: dict[str, Any] = {"max_model_calls": 2}
    plugin = Listening(mode="shadow", **policy)
    await desk.say(plugin)
    for _ in range(2):
        question = desk.open_call
        await desk.say(plugin, "how are you?")
        desk.open_call = question
        await desk.answer(plugin)
    mine, result = replayed(tmp_path / "session.db", **policy)
    assert (result.runs, result.model_calls) == (3, 5)
    assert mine == heard_by(plugin) == Counter({("", "stop", "model_calls", 3.0, 2.0, ""): 1})


def _event(at: float, author: str, invocation: str, part: dict[str, Any], **more: Any) -> dict[str, Any]:
    role = "model" if author != "user" else "user"
    told = {
        "id": f"{invocation}{at}",
        "timestamp": at,
        "author": author,
        "invocation_id": invocation,
        "content": {"role": role, "parts": [part]},
        **more,
    }
    return told | ({"usage_metadata": {"prompt_token_count": 10, "total_token_count": 20}} if author != "user" else {})


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "worked"])
def test_only_the_time_between_a_question_and_its_answer_is_left_out(tmp_path: Path, answered: bool) -> None:
    asked = {"function_call": {"id": "c1", "name": "ask", "args": {}}}
    answer = {"function_response": {"id": "c1", "name": "ask", "response": {"ok": True}}}
    events = [
        _event(0.0, "user", "e-1", {"text": "go"}),
        _event(10.0, "clerk", "e-1", asked, long_running_tool_ids=["c1"]),
        _event(5_000.0, "user" if answered else "clerk", "e-1", answer),
        _event(5_010.0, "clerk", "e-1", asked | {"function_call": {"id": "c2", "name": "ask", "args": {}}}),
        _event(5_020.0, "clerk", "e-1", {"text": "done"}),
    ]
    path = tmp_path / "session.json"
    import json

    path.write_text(json.dumps({"id": "s1", "app_name": "app", "user_id": "u1", "events": events}))
    (batch,) = replay(open_sources(str(path)), [Policy.validated({"max_seconds": 100}, "")])
    ((result,),) = batch.results
    assert [verdict.rule for verdict in result.verdicts] == ([] if answered else ["deadline"])
