"""ADK's stored events, snake or camel case -> neutral steps: what the live adapter reads from hooks, read from the
record.
"""

from collections.abc import Iterator
from typing import Any, Final

from runguard.core.decision import LEFT_OUT, METADATA_KEY, NOT_EXECUTED, NOTICE_KEY, STOP_CODE
from runguard.core.events import Outcome
from runguard.core.identity import answer_text, words_name
from runguard.engine.resume import run_name
from runguard.pricing.rates import Usage
from runguard.providers.usage import CallUsage, EventUsage
from runguard.replay.remote_replies import RemoteReplies
from runguard.replay.steps import (
    Answered,
    Asked,
    Called,
    Changed,
    Delegated,
    Passed,
    Resumed,
    Step,
    Turn,
    time_of,
    word,
)

_Data = dict[str, Any]
_USER: Final = "user"
_CUT: Final = "MAX_TOKENS"  # the finish reason of a response that hit its output limit
# Stops that a model call was refused with: the call was asked for and not made.
_AT_MODEL: Final = frozenset({"model_calls", "deadline", "growth", "context", "budget", "unpriced"})


def either(data: dict[str, Any], snake: str, camel: str) -> Any:
    value = data.get(snake)
    return data.get(camel) if value is None else value


def calls_and_answers(parts: list[Any]) -> tuple[list[_Data], list[_Data]]:
    """The function calls and the function responses of a content."""
    calls = (either(part, "function_call", "functionCall") for part in parts)
    answers = (either(part, "function_response", "functionResponse") for part in parts)
    return [one for one in calls if isinstance(one, dict)], [one for one in answers if isinstance(one, dict)]


class Events:
    """The events of one session, in the order in which they passed the runner."""

    def __init__(self, model: str = "") -> None:
        self._model = model  # where events do not name theirs
        self._invocation = ""
        self._messages: dict[str, int] = {}  # of the user, by invocation
        self._last: tuple[str, str, Any] | None = None  # author, branch and usage of the last model event
        self._usage = EventUsage()
        self._remote = RemoteReplies()

    def rest(self) -> list[Step]:
        """What the end of the session completes."""
        return [*self._remote.rest()]

    def steps(self, event: dict[str, Any]) -> Iterator[Step]:
        """Yield the steps of one event; raise ValueError or TypeError if it is not an event."""
        author = event.get("author") or ""
        content = event.get("content") or {}
        if not isinstance(author, str) or not isinstance(content, dict):
            raise TypeError("an event has an author and a content")
        if event.get("partial"):
            self._usage.read(event)
            return
        at = time_of(event.get("timestamp"))
        actions = event.get("actions") or {}
        parts = [part for part in content.get("parts") or () if isinstance(part, dict)]
        calls, answers = calls_and_answers(parts)
        invocation = word(either(event, "invocation_id", "invocationId"))
        compaction = actions.get("compaction")
        is_message = author == _USER and bool(parts) and not answers and not compaction
        if (invocation and invocation != self._invocation) or is_message or not self._invocation:
            self._invocation, self._last = invocation or "?", None
            yield from self._remote.rest()
            known = self._messages.get(invocation, 0)
            if invocation:
                self._messages[invocation] = known + is_message
            yield Turn(at, run_name(invocation, known + is_message), resumes=bool(known) and not is_message)
        branch = word(event.get("branch"))
        scope = word(either(event, "isolation_scope", "isolationScope"))
        metadata = either(event, "custom_metadata", "customMetadata")
        error = either(event, "error_message", "errorMessage")
        remote = self._remote.read(metadata, error, author, at, branch, scope) if metadata or error else None
        if remote is not None:
            yield from remote
        elif compaction:
            yield Asked(at, "", branch, self._named(event), *self._summary(event, compaction), after_answer=True)
        elif answers:
            self._last = None
            self._usage.pass_by(event)
            if author == _USER:
                yield Resumed(at)
            yield from self._answered(event, at, author, actions, answers)
        elif author != _USER:
            yield from self._spoke(event, at, author, branch, scope, parts, calls)
            if value := _change(event, actions, parts):
                yield Changed(at, author, branch, value, scope)
        else:
            self._usage.pass_by(event)
        target = either(actions, "transfer_to_agent", "transferToAgent")
        if target:
            yield Passed(at, author, branch, word(target), scope)

    def _named(self, event: dict[str, Any]) -> str:
        return word(either(event, "model_version", "modelVersion")) or self._model

    def _summary(self, event: dict[str, Any], compaction: Any) -> tuple[Usage, bool]:
        """What the summary of a compaction took. Where its event does not report that, it is estimated."""
        call = CallUsage()
        call.add(
            {
                **event,
                "content": either(compaction, "compacted_content", "compactedContent")
                if isinstance(compaction, dict)
                else None,
            }
        )
        return call.bill(self._usage.prompt)

    def _spoke(
        self,
        event: dict[str, Any],
        at: float | None,
        author: str,
        branch: str,
        scope: str,
        parts: list[dict[str, Any]],
        calls: list[dict[str, Any]],
    ) -> Iterator[Step]:
        if either(event, "error_code", "errorCode") == STOP_CODE:
            trip = (either(event, "custom_metadata", "customMetadata") or {}).get(METADATA_KEY)
            if isinstance(trip, dict) and trip.get("rule") in _AT_MODEL:
                yield Asked(at, author, branch, self._named(event), Usage(), refused=True, scope=scope)
            return
        raw = either(event, "usage_metadata", "usageMetadata")
        has_content = (
            raw is not None
            or bool(calls)
            or any(event.get(name) for name in ("model_version", "modelVersion", "finish_reason", "finishReason"))
        )
        if not has_content or (not parts and (author, branch, raw) == self._last):
            self._usage.pass_by(event)
            return  # an agent's or a node's own event; or the empty end of a stream, which repeats its usage
        self._last = (author, branch, raw)
        taken = self._usage.read(event, is_answer=True)
        path = (either(event, "node_info", "nodeInfo") or {}).get("path") or ""
        opened_by = path.rpartition("@")[2]
        if opened_by and not opened_by.isdigit():
            # a task: its node is named by the call; one of an agent called as a tool has a number
            yield Delegated(opened_by)
        text_id, words = 0, ""
        if all(isinstance(p.get("text"), str) for p in parts):
            words = "".join(p["text"] for p in parts if isinstance(p.get("text"), str) and not p.get("thought"))
            text_id = words_name(words or str(either(event, "error_code", "errorCode") or ""))
        batch = word(event.get("id"))
        if taken is not None:  # else the function calls of an answer whose words came before
            yield Asked(
                at,
                author,
                branch,
                self._named(event),
                taken.usage,
                taken.estimated,
                batch,
                text_id,
                bool(calls),
                scope=scope,
                is_cut=either(event, "finish_reason", "finishReason") == _CUT,
                text=words,
            )
        for call in calls:
            yield Called(
                at, author, branch, batch, word(call.get("id")), word(call.get("name")), call.get("args"), scope
            )

    def _answered(
        self,
        event: dict[str, Any],
        at: float | None,
        author: str,
        actions: dict[str, Any],
        answers: list[dict[str, Any]],
    ) -> Iterator[Step]:
        waiting = {
            *(either(actions, "requested_tool_confirmations", "requestedToolConfirmations") or ()),
            *(either(actions, "requested_auth_configs", "requestedAuthConfigs") or ()),
        }
        ends = author == _USER or bool(
            either(actions, "skip_summarization", "skipSummarization") or actions.get("escalate")
        )
        for answer in answers:
            value, outcome = answer.get("response"), None
            if isinstance(value, dict):
                if value.get("status") in (NOT_EXECUTED, LEFT_OUT) and "message" in value and len(value) == 2:
                    outcome = Outcome.REFUSED
                elif NOTICE_KEY in value:
                    value = {key: entry for key, entry in value.items() if key != NOTICE_KEY}  # it was judged without
            name, call_id = word(answer.get("name")), word(answer.get("id"))
            yield Answered(at, author, call_id, name, value, outcome, word(event.get("id")), ends, call_id in waiting)


def _change(event: dict[str, Any], actions: dict[str, Any], parts: list[dict[str, Any]]) -> int:
    """A name for what the event has stored, 0 for nothing. The words of an agent under its ``output_key`` are words."""
    stored, output = either(actions, "state_delta", "stateDelta"), None if parts else event.get("output")
    changed: list[Any] = [] if output is None else [output]
    if isinstance(stored, dict) and stored:
        words = "".join(p["text"] for p in parts if isinstance(p.get("text"), str) and not p.get("thought"))
        changed += [[key, value] for key, value in stored.items() if value != words]
    return words_name(answer_text(changed)) if changed else 0
