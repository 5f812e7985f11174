"""Replies of remote agents: each model call is read once, whatever a task still carries of earlier ones."""

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.providers.a2a import ReplyReader

ANSWER = [{"data": {}, "metadata": {"adk_type": "function_response"}}]
CALL = [{"data": {}, "metadata": {"adk_type": "function_call"}}]
WORDS = [{"text": "done"}]


class Task:
    """A remote task as ADK keeps it: every message adds its metadata to that of the task."""

    def __init__(self, name: str = "t") -> None:
        self.name, self.events = name, 0
        self.metadata: dict[str, Any] = {}

    def says(self, parts: Any, tokens: int | None = None, state: str = "working", **metadata: Any) -> dict[str, Any]:
        self.events += 1
        fresh = {"adk_event_id": f"{self.name}-{self.events}", "adk_author": "far", **metadata}
        if tokens is not None:
            fresh["adk_usage_metadata"] = {"promptTokenCount": float(tokens), "totalTokenCount": float(tokens)}
        self.metadata = {**self.metadata, **fresh}
        return self.again(parts, state)

    def again(self, parts: Any = None, state: str = "completed") -> dict[str, Any]:
        status = {"state": state} if parts is None else {"state": state, "message": {"parts": parts}}
        return {"id": self.name, "status": status, "metadata": dict(self.metadata)}


def tokens_of(reader: ReplyReader, responses: list[dict[str, Any]]) -> list[int]:
    return [usage.input + usage.output for one in responses for usage in reader.read(one).reports]


@given(st.lists(st.sampled_from([10, 20]), min_size=1, max_size=20), st.booleans())
def test_a_loop_of_calls_is_read_call_by_call(taken: list[int], answers_first: bool) -> None:
    task, seen = Task(), []
    for number, tokens in enumerate(taken):
        last = number == len(taken) - 1
        seen.append(task.says(WORDS if last else CALL, tokens))
        if not last:
            seen += [task.says(ANSWER), *([task.again(ANSWER, "working")] if answers_first else [])]
    seen += [task.again(WORDS, "working"), task.again()]
    assert tokens_of(ReplyReader(), seen) == taken


def test_messages_that_no_model_wrote_are_not_calls() -> None:
    task = Task()
    seen = [task.says(CALL, 10), task.says(WORDS), task.says(WORDS, adk_error_code="RUNGUARD_STOP"), task.again()]
    assert tokens_of(ReplyReader(), seen) == [10]


def test_another_agent_with_equal_figures_is_another_call() -> None:
    task = Task()
    seen = [task.says(WORDS, 10), task.says(WORDS, 10, adk_author="other"), task.again()]
    assert tokens_of(ReplyReader(), seen) == [10, 10]


def test_the_agent_behind_a_remote_agent_is_read_once() -> None:
    outer, inner, seen = Task("outer"), Task("inner"), []
    seen.append(outer.says(CALL, 10))
    seen.append(outer.says(ANSWER))
    for state in (inner.says(CALL, 10), inner.says(ANSWER), inner.says(WORDS, 10), inner.again()):
        relayed = json.dumps({"a2a:response": state})
        seen.append(outer.says(WORDS, adk_author="onward", adk_custom_metadata=relayed))
    seen.append(outer.again())
    assert tokens_of(ReplyReader(), seen) == [10, 10, 10]


def test_metadata_that_is_the_text_of_a_python_object_is_read() -> None:
    inner = Task("inner").says(WORDS, 10)
    text = repr({"a2a:response": inner}).replace("'working'", "<TaskState.working: 'working'>")
    task = Task()
    assert tokens_of(ReplyReader(), [task.says(WORDS, adk_custom_metadata=text)]) == [10]


def test_figures_beside_an_artifact_are_exact() -> None:
    metadata = [{"adk_event_id": str(n), "adk_usage_metadata": {"promptTokenCount": 10}} for n in range(3)]
    response = {"id": "t", "status": {"state": "completed"}, "artifacts": [{"metadata": m} for m in metadata]}
    assert tokens_of(ReplyReader(), [response, response]) == [10, 10, 10]


def test_a_plain_message_is_a_whole_reply() -> None:
    reply = ReplyReader().read({"messageId": "m", "role": "agent", "parts": [{"text": "hi"}]})
    assert (reply.reports, reply.trip, reply.is_over) == ([], None, True)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "id",
                        "status",
                        "message",
                        "metadata",
                        "parts",
                        "artifacts",
                        "adk_usage_metadata",
                        "adk_custom_metadata",
                        "a2a:response",
                        "runguard",
                        "state",
                    ]
                ),
                x,
            )
        ),
        max_leaves=30,
    )
)
def test_nothing_that_a_peer_sends_breaks_the_reader(response: Any) -> None:
    assert ReplyReader().read(response).reports is not None


def test_the_stop_of_one_branch_and_a_stop_in_shadow_mode_do_not_end_this_run() -> None:
    for more, counts in (({}, True), ({"branch": "b"}, False), ({"enforced": False}, False)):
        trip = {"v": 1, "rule": "budget", "enforced": True, **more}
        state = Task().says(WORDS, adk_custom_metadata=json.dumps({"runguard": trip}))
        assert (ReplyReader().read(state).trip is not None) is counts


# ---- metadata that would take long to parse -------------------------------------------------------------------------

OBJECT = "{'promptTokenCount': 7, 'totalTokenCount': 7, 'trafficType': <TrafficType.ON_DEMAND: 'ON_DEMAND'>}"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The longest text that each parser was given."""
    longest: dict[str, int] = {}

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def parse(text: str) -> Any:
            longest[name] = max(longest.get(name, 0), len(text))
            return original(text)

        monkeypatch.setattr(owner, name, parse)

    watch(json, "loads")
    watch(ast, "literal_eval")
    return longest


@pytest.mark.parametrize(
    "text", ["{" + "'a': 1, " * 100_000, "{" + "[]," * 333_000, '{"a": ' * 160_000, '{"a": [' + "{}," * 300_000]
)
def test_large_metadata_is_not_parsed(text: str, parsed: dict[str, int]) -> None:
    for name in ("adk_usage_metadata", "adk_custom_metadata"):
        reply = ReplyReader().read({"id": "t", "status": {"state": "working"}, "metadata": {name: text}})
        assert not reply.reports
    assert parsed == {}


def test_objects_as_text_are_parsed_only_while_they_are_small(parsed: dict[str, int]) -> None:
    many = OBJECT.replace("{", "{'x': [" + "[], " * 2_000 + "], ", 1)
    long = OBJECT.replace("{", "{'x': '" + "x" * 10_000 + "', ", 1)
    longer = OBJECT.replace("{", "{'x': '" + "x" * 20_000 + "', ", 1)
    code = "{" + "1 if 1 else " * 100 + "1}"
    texts = [OBJECT, many, long, longer, code]
    tasks = [{"id": str(n), "metadata": {"adk_usage_metadata": text}} for n, text in enumerate(texts)]
    assert tokens_of(ReplyReader(), tasks) == [7, 7]
    assert parsed["literal_eval"] <= len(long)
    assert parsed["loads"] <= 100_000
