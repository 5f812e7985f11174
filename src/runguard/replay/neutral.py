"""The neutral JSONL: one run per line, with messages, model calls, tool calls and results of any framework.

``{"id", "steps": [...]}``, optionally ``source, model, task, success, capped, labels, total_cost_usd, app, user,
session``. A step has
``kind`` (message, model, tool_call, tool_result, error), ``agent``, ``tool``, ``args``, ``result``, ``text`` and, when
known, ``call_id``,
``error``, ``branch``, ``input_tokens``, ``output_tokens``, ``cached_tokens``, ``usd``, ``ts``, ``text_chars``,
``result_chars``.
A line without steps is a run of a plain log: see ``plain_log``.
"""

from collections.abc import Iterator
from typing import Any, Final

from runguard.core.events import Outcome
from runguard.core.identity import CHARS_PER_TOKEN, size_of, words_name
from runguard.core.outcomes import classify
from runguard.pricing.rates import Usage
from runguard.providers.messages import TRANSFER
from runguard.replay import plain_log
from runguard.replay.bounded_files import load_json
from runguard.replay.steps import (
    Answered,
    Asked,
    Called,
    CheckedRun,
    Faults,
    Passed,
    RecordedRun,
    Step,
    Turn,
    possible,
    time_of,
    word,
)

_ENOUGH: Final = 64_000_000
_KINDS: Final = ("model", "tool_call", "tool_result", "message", "error")  # a broken kind may not be hashable


def read_line(line: bytes, where: str, faults: Faults) -> RecordedRun | None:
    """Return the run of one line; None if it cannot be read, with the reason added to ``faults``."""
    try:
        run = load_json(line)
    except ValueError as error:
        faults.add(where, f"not valid JSON: {error}")
        return None
    if isinstance(run, dict) and plain_log.is_plain(run):
        return plain_log.run_of(run, where, faults)
    if not isinstance(run, dict) or not isinstance(run.get("steps"), list):
        faults.add(where, "no run: expected an object with a list of steps, or with usd, tokens or calls")
        return None
    return run_of(run, where, faults)


def run_of(run: dict[str, Any], where: str, faults: Faults) -> RecordedRun:
    name = word(run.get("id")) or word(run.get("session")) or where
    return CheckedRun(
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
                    yield Turn(began if at is None else at)
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
                asked.nano = plain_log.nano_of(step["usd"])
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
