"""OpenHands, its stuck detector: the SDK (OpenHands/software-agent-sdk 611629e6, 2026-08-22) and V0
(All-Hands-AI/OpenHands 156d0686, 2025-11-28).

Both look at the latest actions and observations before each response and stop: the same action and observation 4 times;
the same action with an error 3 times (the SDK tells the model at 3 and stops at 4); two actions in turn over 6; 3
messages of the agent.
SDK: the thought belongs to the action, any 3 messages in a row count, and it sees the last 20 events since the user's
last message.
V0: messages are actions too, of a shell only the command and its exit code are compared, 3 messages must be equal with
no observation between; headless it sees the whole history. V0's rule on condensations is left out: no recorded run
tells of them.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

from rivals.steps import ANSWERS, Said, Step, answer_of, in_order, is_agents_message, is_user, text_of

SAME, FAILED, MESSAGES, IN_TURN = 4, 3, 3, 6
WINDOW = 20
_SHELLS = ("bash", "execute_bash", "terminal", "shell", "run", "run_command", "cmd", "exec")


class Event(NamedTuple):
    kind: str  # action, observation, error, message
    content: Any


class _OpenHands:
    """Steps to events: a response without a call is a message; checked when no call waits for its answer."""

    empty_messages_count = False
    only_since_the_user = True

    def __init__(self) -> None:
        self._words: str | None = None  # of a response that has made no call yet
        self._waiting = 0

    def feed(self, step: Step) -> Said:
        kind, said = step["kind"], None
        if kind == "tool_call":
            thought, self._words = text_of(step) or self._words or "", None
            self._waiting += 1
            self.add(Event("action", self.action(step, thought)))
            return None
        if self._words is not None and (kind == "model" or is_user(step) or is_agents_message(step)):
            if self._words or self.empty_messages_count:
                said = self._message(self._words)
            self._words = None
        if is_user(step):
            self._waiting = 0
            if self.only_since_the_user:
                self.forget()
        elif kind == "model":
            self._words = text_of(step)
        elif is_agents_message(step):
            message = self._message(text_of(step))
            said = said or message
        elif kind in ANSWERS:
            self._waiting = max(0, self._waiting - 1)
            self.add(Event("error" if kind == "error" else "observation", self.observation(step)))
            said = self.check() if self._waiting == 0 else None
        return said

    def _message(self, words: str) -> Said:
        self.add(Event("message", words))
        return self.check()

    def action(self, step: Step, thought: str) -> Any:
        return step.get("tool"), in_order(step.get("args")), thought

    def observation(self, step: Step) -> Any:
        return step.get("tool"), answer_of(step)

    def add(self, event: Event) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        raise NotImplementedError

    def check(self) -> Said:
        raise NotImplementedError


class OpenHandsSdk(_OpenHands):
    empty_messages_count = True

    def __init__(self, *, thoughts: bool = True) -> None:
        super().__init__()
        self.thoughts = thoughts
        self._events: deque[Event] = deque(maxlen=WINDOW)
        self._errors = self._told_at = 0

    def action(self, step: Step, thought: str) -> Any:
        return super().action(step, thought if self.thoughts else "")

    def add(self, event: Event) -> None:
        self._errors += event.kind == "error"
        self._events.append(event)

    def forget(self) -> None:
        self._events.clear()

    def check(self) -> Said:
        latest = list(reversed(self._events))
        actions = [event for event in latest if event.kind == "action"]
        seen = [event for event in latest if event.kind in ("observation", "error")]
        failed = _leading(
            action == actions[0] and what.kind == "error" for action, what in zip(actions, seen, strict=False)
        )
        if failed == FAILED and self._told_at != self._errors:
            self._told_at = self._errors  # once for each error
            return "nudge", f"the same action failed {failed} times"
        if _all_equal(actions, SAME) and _all_equal(seen, SAME):
            return "stop", f"the same action and observation {SAME} times"
        if failed > FAILED:
            return "stop", f"the same action failed {failed} times"
        messages = _leading(event.kind == "message" for event in latest)
        if messages >= MESSAGES:
            return "stop", f"{messages} messages in a row"
        return _in_turn(actions, seen)


class OpenHandsV0(_OpenHands):
    def __init__(self, *, headless: bool = True) -> None:
        super().__init__()
        self.only_since_the_user = not headless
        self._commands: dict[object, str] = {}
        self.forget()

    def forget(self) -> None:
        self._actions: deque[Event] = deque(maxlen=IN_TURN)
        self._seen: deque[Event] = deque(maxlen=IN_TURN)
        self._messages: deque[tuple[str, int]] = deque(maxlen=MESSAGES)  # with the number of observations before each
        self._observed = 0

    def action(self, step: Step, thought: str) -> Any:
        self._commands[step.get("call_id") or step.get("tool")] = in_order(step.get("args"))
        return super().action(step, thought)

    def observation(self, step: Step) -> Any:
        if step["kind"] == "tool_result" and step.get("tool") in _SHELLS:
            return step.get("tool"), self._commands.get(step.get("call_id") or step.get("tool")), step.get("exit_code")
        return super().observation(step)

    def add(self, event: Event) -> None:
        if event.kind in ("action", "message"):
            self._actions.appendleft(event)
        else:
            self._seen.appendleft(event)
            self._observed += 1
        if event.kind == "message":
            self._messages.append((event.content, self._observed))

    def check(self) -> Said:
        actions, seen = list(self._actions), list(self._seen)
        if _all_equal(actions, SAME) and _all_equal(seen, SAME):
            return "stop", f"the same action and observation {SAME} times"
        if (
            _all_equal(actions, FAILED)
            and len(seen) >= FAILED
            and all(event.kind == "error" for event in seen[:FAILED])
        ):
            return "stop", f"the same action failed {FAILED} times"
        if len(self._messages) == MESSAGES and len(set(self._messages)) == 1:
            return "stop", f"{MESSAGES} equal messages"
        return _in_turn(actions, seen)


def _leading(flags: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


def _all_equal(events: list[Event], count: int) -> bool:
    return len(events) >= count and all(event == events[0] for event in islice(events, count))


def _in_turn(actions: list[Event], seen: list[Event]) -> Said:
    two = [events[:IN_TURN] for events in (actions, seen)]
    if all(len(events) == IN_TURN and events[2:] == events[:-2] for events in two):
        return "stop", f"two actions in turn over {IN_TURN}"
    return None
