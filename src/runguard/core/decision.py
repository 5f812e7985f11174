"""What was found, what follows from it, and how it is said: to the model, to the end user, to the operator.

The rules make a ``Finding``, ``engine/decide`` makes the ``Decision`` and its ``Trip``, and the adapters carry it out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from decimal import Decimal
from enum import IntEnum
from math import inf
from typing import Any, Final, Self, TypeVar

STOP_CODE: Final = "RUNGUARD_STOP"
METADATA_KEY: Final = "runguard"
NOTICE_KEY: Final = "runguard_notice"
# The status of an answer that RunGuard gives for a tool: nothing was done, or the answer is not shown.
NOT_EXECUTED: Final = "not_executed"
LEFT_OUT: Final = "answer_left_out"
METADATA_VERSION: Final = 1
MAX_EVIDENCE: Final = 5


class Action(IntEnum):
    """The ladder. A higher rung wins over a lower one."""

    ALLOW = 0
    WARN = 1
    NUDGE = 2
    BLOCK = 3
    STOP = 4

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Rungs:
    """At which count a rule does what; ``None`` leaves a rung out. Counts are inclusive: ``stop=5`` acts at five.

    ``withhold`` is a nudge after which the tool is left out of the requests of this part of the run.
    """

    warn: float | None = None
    nudge: float | None = None
    block: float | None = None
    stop: float | None = None
    withhold: float | None = None

    lowest: float = field(init=False, repr=False, compare=False)  # below it there is nothing to say

    def __post_init__(self) -> None:
        rungs = (self.warn, self.nudge, self.withhold, self.block, self.stop)
        object.__setattr__(self, "lowest", min([rung for rung in rungs if rung is not None], default=inf))

    def at(self, count: float) -> tuple[Action, float] | None:
        """Return the action of the strongest rung that ``count`` has reached, and that rung's number.

        None: no rung is reached.
        """
        if count < self.lowest:
            return None
        if self.stop is not None and count >= self.stop:
            return Action.STOP, self.stop
        if self.block is not None and count >= self.block:
            return Action.BLOCK, self.block
        if self.withhold is not None and count >= self.withhold:
            return Action.NUDGE, self.withhold
        if self.nudge is not None and count >= self.nudge:
            return Action.NUDGE, self.nudge
        assert self.warn is not None
        return Action.WARN, self.warn


# Units of findings of the rule no_news about loops behind noise.
SAME_ANSWER: Final = "equal long answers"
SAME_PAIR: Final = "equal answers to one call"
LOOK_ALIKE: Final = "calls that read alike"
ONLY_NOTES: Final = "notes in a row"
NEAR_EQUAL: Final = "nearly equal long calls"
REWORDED: Final = "answers in other words"  # to one call
ORDERS: Final = "rounds of the same work"  # of an agent that is set to work again and again
TOLD_AGAIN: Final = "reports in known words"  # of an agent that is called as a tool and uses no tools
CUT_OFF: Final = "calls with missing arguments"  # unit of a finding of the rule stall about rejected calls
# unit of a finding of the rule stall about answers that look like success and say "try again"
TRY_AGAIN: Final = "answers that ask to try again"
LASTING: Final = "equal failures between other work"  # unit of a finding of the rule stall
WANDERING: Final = "answers that differ in numbers alone"  # unit of a finding of the rule same_call
IDLE: Final = "texts in a row after work"  # unit of a finding of the rule talk
HANDOFF_ROUNDS: Final = "rounds of hand-offs"  # unit of a finding of the rule cycle about agents instead of calls
# Units of findings after which the tool may be withheld: it does not work, or has nothing to say.
EQUAL_FAILURES, ANY_FAILURES, EMPTY_ANSWERS = "equal failures", "failures in a row", "empty answers"
WITHHOLDING: Final = frozenset({EQUAL_FAILURES, ANY_FAILURES, EMPTY_ANSWERS, TRY_AGAIN})


@dataclass(slots=True)
class Finding:
    """A rule's observation: the number, the limit it met, and what shows it."""

    rule: str
    action: Action
    observed: Decimal | float
    limit: Decimal | float
    unit: str
    scope: str = "lane"  # "call" refuses one call, "lane" its strand of the run, "run" everything
    tool: str = ""
    key: str = ""  # what it is about: the same key is nudged once
    detail: str = ""  # for the operator: a path, an agent; never what a tool has said
    evidence: tuple[dict[str, str], ...] = ()
    money: "Money | None" = None  # set for a finding about a budget


@dataclass(frozen=True, slots=True)
class Money:
    """Whose budget a finding is about, and how it stands."""

    kind: str
    scope: str
    spent_usd: Decimal | None
    reserved_usd: Decimal | None
    ends: float | None = None  # when its window resets
    resume: str = ""
    key: str = ""  # the account: its scope, window and period


@dataclass(slots=True)
class Decision:
    """What to do about one event. ``enforced`` is False in shadow mode: decided and recorded, not carried out."""

    action: Action = Action.ALLOW
    finding: Finding | None = None
    trip: "Trip | None" = None
    for_model: str = ""
    enforced: bool = True
    retry_after: float | None = None
    withheld: str = ""  # a tool that the next requests leave out

    def __bool__(self) -> bool:
        return self.action is not Action.ALLOW


ALLOW: Final = Decision()


@dataclass(frozen=True, slots=True)
class Trip:
    """A stop that was decided. ``str(trip)`` is the operator's message; money is ``Decimal`` or None when not known."""

    id: str
    rule: str
    action: str
    scope: str
    scope_id: str
    unit: str
    app: str
    user_id: str
    session_id: str
    run_id: str
    invocation_id: str
    message: str
    resume: str
    policy_digest: str
    at: float
    observed: Decimal | float
    limit: Decimal | float
    agent_path: tuple[str, ...] = ()
    branch: str | None = None
    tool: str | None = None
    model: str | None = None
    evidence: tuple[Mapping[str, str], ...] = ()
    model_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    spent_usd: Decimal | None = None
    reserved_usd: Decimal | None = None
    enforced: bool = True
    estimated: bool = False
    resumable: bool = True
    resets_at: float | None = None  # when the window of the budget that refused ends, in seconds since 1970

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, Any]:
        """Return the trip as it is stored in an event's metadata, ready for JSON, with money as decimal strings."""
        data = asdict(self)
        for key in _MONEY:
            data[key] = str(data[key]) if isinstance(data[key], Decimal) else data[key]
        data["agent_path"] = list(self.agent_path)
        data["evidence"] = [dict(item) for item in self.evidence]
        return {"v": METADATA_VERSION, "retryable": False, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the trip that ``to_dict`` wrote. Unknown keys are ignored."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["agent_path"] = tuple(known.get("agent_path", ()))
        known["evidence"] = tuple(known.get("evidence", ()))
        for key in _MONEY:
            if isinstance(known.get(key), str):
                known[key] = Decimal(known[key])
        return cls(**known)


_MONEY: Final = ("spent_usd", "reserved_usd", "observed", "limit")

# Where events, messages and answers keep data for programs: of ADK, of its JSON, of LangChain, of Pydantic AI and
# Strands, of Agent Framework.
_METADATA: Final = ("custom_metadata", "customMetadata", "response_metadata", "metadata", "additional_properties")
_LAST: Final = ("messages", "message", "response")  # where results keep their last message


def trip(event: Any) -> Trip | None:
    """Return the trip that an event, a message or a result carries, or None.

    Takes an ADK event, a message or a result of the other frameworks, and the JSON of an event or a message as a
    mapping. The last message of a result counts.
    """
    return _trip_in(event, len(_LAST))


def _trip_in(holder: Any, depth: int) -> Trip | None:
    """Return the trip that is at most ``depth`` messages deep in an object or in a mapping."""
    for name in _METADATA:
        if isinstance(metadata := _part(holder, name), Mapping):
            data = metadata.get(METADATA_KEY) or _part(metadata.get("custom"), METADATA_KEY)
            if isinstance(data, Mapping) and data.get("v") == METADATA_VERSION:
                return Trip.from_dict(data)
    if isinstance(found := _part(_part(holder, METADATA_KEY), "trip"), Trip):  # a result of the OpenAI Agents SDK
        return found
    for name in _LAST if depth else ():
        inner = _part(holder, name)
        inner = inner[-1] if isinstance(inner, list) and inner else inner
        if inner is not None and (found := _trip_in(inner, depth - 1)) is not None:
            return found
    return None


def _part(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    try:
        return getattr(holder, name, None)
    except Exception:  # a result that has no last message
        return None


@dataclass(slots=True)
class RunCounts:
    """What a run has used so far. Its money is in its ``RunCosts``."""

    model_calls: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


# ---- What the model, the end user and the operator read about a decision.

# For the model: how often what has happened, and then what to do instead. A notice does not repeat the call that it is
# about: a model that reads the call once more makes it once more. These texts stay in the history, so whatever they
# forbid they forbid for this turn only: the next one starts with fresh counters.
_NUDGES: Final[dict[str, str]] = {
    "repetition": "{n} equal calls have brought {n} equal answers, and another one will bring no other. {instead}",
    "no_news": "The last {n} steps have only brought answers that were there before. {instead}",
    "cycle": "{n} rounds of the same calls have brought the same answers. {instead}",
    "same_call": "One call was made {n} times in a row. If you wait for something, say so and finish. {instead}",
    "stall": "{n} attempts have failed in the same way, and another one of this kind will fail, too. {instead}",
    "empty": "{n} answers in a row were empty: what you look for may not be there. {instead}",
    "tool_failures": "{n} attempts in a row have failed. {instead}",
    "handoff": (
        "This task has been passed between the same agents {n} times with nothing new. Do not pass it on again in "
        "this turn: answer it with what is known, or ask the user for what is missing."
    ),
    "talk": (
        "{n} texts have been written in a row and nothing was done. Do the next step, give the result, or ask the user "
        "for what is missing."
    ),
    "budget": (
        "Little is left of what may be used in this turn: {left}. Finish now: give your best answer with what you "
        "already have."
    ),
    "polling": (
        "There has been no change for {n} seconds. Report the current state and finish; do not keep checking in this "
        "turn."
    ),
}
# Nudges of findings whose unit says more than their rule.
_NUDGES_BY_UNIT: Final[dict[str, str]] = {
    CUT_OFF: (
        "This call was not executed: its arguments were empty or cut off, {n} times in a row. A response has a limited "
        "length. Send less per call: split the work into several smaller calls."
    ),
    TRY_AGAIN: (
        "{n} answers have only asked to try again, whatever the question was. Another attempt in this turn will "
        "probably be answered alike. {instead}"
    ),
    SAME_ANSWER: "{n} different questions have brought one and the same answer. {instead}",
    SAME_PAIR: "The same answer has come {n} times; the work between has not changed it. {instead}",
    LOOK_ALIKE: "{n} questions that read alike have brought the same answer. {instead}",
    NEAR_EQUAL: (
        "{n} nearly equal long calls were sent in a row. If the last version is good enough, go on with the next step. "
        "{instead}"
    ),
    REWORDED: "{n} answers in a row have said the same in other words. {instead}",
    WANDERING: "The last {n} answers differ in their numbers alone, which do not move one way. {instead}",
    LASTING: (
        "This has failed in the same way {n} times, and the work between has not changed it. Look for the cause "
        "elsewhere. {instead}"
    ),
    ORDERS: (
        "'{tool}' was set to work {n} times, made the same calls each time and got the same answers. The same order in "
        "other words will not change that. Give another order, finish with what is known, or ask the user for what is "
        "missing."
    ),
    TOLD_AGAIN: (
        "'{tool}' has reported the same in other words {n} times. The same order in other words will not change that. "
        "Give another order, finish with what is known, or ask the user for what is missing."
    ),
    ONLY_NOTES: "{n} plans or notes were written in a row and nothing was done. Do the next step now, or finish.",
}
_INSTEAD: Final = "Finish with what is known, or ask the user for what is missing."
_INSTEAD_USE: Final = "Use {others}, finish with what is known, or ask the user for what is missing."
_WITHHELD: Final = " This tool is not offered any more in this turn."
_OTHERS_NAMED: Final = 3
_REFUSALS: Final[dict[str, str]] = {
    "repetition": (
        "Not executed: this exact call was already answered {before} times with the same result, which stands above. "
        "Do not make it again in this turn; use that result or finish."
    ),
    "stall": (
        "Not executed: '{tool}' has failed in the same way {before} times. Do not call it again in this turn; go "
        "on without it or report the failure."
    ),
    "tool_failures": (
        "Not executed: '{tool}' has failed {before} times in a row. Do not call it again in this turn; go on "
        "without it or report the failure."
    ),
    "breaker": (
        "Not executed: '{tool}' is out of service at the moment. Do not call it again in this turn; go on without "
        "it or report the failure."
    ),
    "depth": (
        "Not executed: the task has been delegated too many times already. Do not delegate it further in this "
        "turn; answer with what is known."
    ),
    "tool_limit": (
        "Not executed: '{tool}' may be called {limit} times in one turn and has been. Do not call it again in this "
        "turn; use the answers you have."
    ),
    "budget": (
        "Not executed: what is left for this turn does not pay for '{tool}'. Do not call it again in this turn; use "
        "the answers you have."
    ),
    "unpriced": (
        "Not executed: it is not known what '{tool}' would cost. Do not call it again in this turn; use the answers "
        "you have."
    ),
    "once": "Not executed: '{tool}' with these arguments has been done, or is being done right now. Do not repeat it.",
    "once_unsure": (
        "Not executed: it cannot be checked right now whether '{tool}' with these arguments has been done before. "
        "Do not call it again in this turn; report that it was not done now."
    ),
    "fan_out": (
        "Not started: too many calls are running at once. Do not retry in this turn; go on with the results that "
        "are there."
    ),
    "context": (
        "'{tool}' was executed; its answer was too large for this conversation and was left out. Do not make the same "
        "call again; ask for a smaller part, if the tool offers it."
    ),
    "result_size": (
        "'{tool}' was executed; its answer was too large and was left out. Do not make the same call again; ask for a "
        "smaller part, if the tool offers it."
    ),
}
STOPPED: Final = "Not executed: this turn was stopped."
PART_STOPPED: Final = "Not finished: this part was stopped. Do not call it again in this turn."
TERMINATED: Final = "Not executed: this part had already ended."

# For the end user: plain, no money, no internal names.
_STOP_TEXTS: Final[dict[str, str]] = {
    "repetition": "I stopped because I kept repeating the same step without getting any further.",
    "no_news": "I stopped because I kept repeating the same steps without getting any further.",
    "cycle": "I stopped because I kept repeating the same steps without getting any further.",
    "same_call": "I stopped because I kept repeating the same step.",
    "stall": "I stopped because a step kept failing in the same way.",
    "tool_failures": "I stopped because a step kept failing.",
    "handoff": "I stopped because the request was passed back and forth without getting any further.",
    "talk": "I stopped because the discussion went on without getting any further.",
    "reentry": "I stopped because the request was passed back to a part that had already worked on it.",
    "resubmission": (
        "I did not start because the same request has failed in the same way a short while ago. Please change it, or "
        "ask again later."
    ),
    "fan_out": "This part was not started because too much was running at once. Please do not retry it.",
    "deadline": "I stopped because this was taking too long.",
    "growth": "I stopped because the conversation has grown too large to go on like this.",
    "context": "I stopped because the conversation has grown too large to go on.",
    "polling": "I stopped waiting because nothing has changed for a long time.",
    "remote_stop": "I stopped because a service that I work with stopped this request.",
    "kill_switch": "I stopped because an operator has stopped this.",
    "policy_error": "I did not start because the safety settings of this service are not valid.",
    "guard_error": "I stopped because a safety check could not be made.",
}
_STOP_TEXT: Final = "I stopped because this request reached a safety limit."
# What a stop may be by: the keys of ``stop_text``.
STOPPING_RULES: Final = (
    *_STOP_TEXTS,
    "breaker",
    "budget",
    "depth",
    "empty",
    "model_calls",
    "once",
    "once_unsure",
    "result_size",
    "stopped",
    "tool_calls",
    "tool_limit",
    "unpriced",
)


def text_for_model(finding: Finding, others: Sequence[str] = (), *, withheld: bool = False) -> str:
    """Return the nudge or refusal that the model reads in place of, or beside, a tool's answer.

    ``others``: other tools that it could use. ``withheld``: the tool is not offered any more.
    """
    if finding.action is Action.STOP:
        return STOPPED
    texts = _NUDGES if finding.action is Action.NUDGE else _REFUSALS
    by_unit = _NUDGES_BY_UNIT.get(finding.unit) if finding.action is Action.NUDGE else None
    template = by_unit or texts.get(finding.rule) or _REFUSALS["repetition"]
    names = [f"'{name}'" for name in others[:_OTHERS_NAMED]]
    joined = " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
    text = template.format(
        n=_number(finding.observed),
        before=_number(max(finding.observed - 1, 1)),
        limit=_number(finding.limit),
        tool=finding.tool,
        instead=_INSTEAD_USE.format(others=joined) if names else _INSTEAD,
        left=_left(finding) if finding.rule == "budget" else "",
    )
    return f"{text}{_WITHHELD}" if withheld else text


def _left(finding: Finding) -> str:
    """Return what is left of a budget, as the model reads it."""
    limit = Decimal(str(finding.limit))
    left = max(limit - Decimal(str(finding.observed)), Decimal(0))
    if finding.unit != "usd":
        return f"{_number(left)} of {_number(limit)} {finding.unit}"
    return f"${left:.2f} of ${limit:.2f}" if left >= 1 else f"${left:.4f} of ${limit:.4f}"


def text_for_user(rule: str) -> str:
    """Return the sentence that an end user may see. It names neither money nor anything internal."""
    return _STOP_TEXTS.get(rule, _STOP_TEXT)


def text_for_operator(
    finding: Finding,
    *,
    path: tuple[str, ...],
    model_calls: int,
    tool_calls: int,
    tokens: int,
    spent: str,
    enforced: bool,
) -> str:
    """Return one line with the rule, its value and limit, where it fired, and what the run took so far.

    ``path``: the agents from the root inwards. ``spent``: the text about money, empty where there is none.
    ``enforced``: False says that the run would have been stopped.
    """
    about = f" of tool '{finding.tool}'" if finding.tool else ""
    # the detail of a hand-off is its path
    detail = f" ({finding.detail})" if finding.detail and finding.rule not in ("handoff", "reentry") else ""
    where = f", in {'→'.join(path)}" if path else ""
    verb = "stopped" if enforced else "would have stopped"
    found = against_limit(finding.observed, finding.unit, finding.limit) + detail
    if finding.money is not None:
        found = f"{finding.money.scope}, {finding.detail}"
    so_far = (
        f"{_count(model_calls, 'model call')}, {_count(tool_calls, 'tool call')}, {_count(tokens, 'token')}{spent} "
        "so far"
    )
    return printable(f"{verb} by {finding.rule}{about}: {found}{where}; {so_far}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number:,} {thing}s"


def against_limit(observed: Decimal | float, unit: str, limit: Decimal | float) -> str:
    """Return what a rule counted: 21 tool calls, limit 20."""
    if unit == "usd":
        return f"{dollars_text(observed)}, limit {dollars_text(limit)}"
    return f"{_counted(observed, unit)}, limit {_number(limit)}"


def dollars_text(value: Decimal | float) -> str:
    """Return dollars as ``$0.10``: with two decimals, or as many as they need."""
    whole, _, cents = f"{Decimal(str(value)):f}".partition(".")
    return f"${whole}.{cents.ljust(2, '0')}"


def _counted(number: Decimal | float, unit: str) -> str:
    """Format a number with its unit: 2 re-entries, 1 re-entry."""
    if number == 1 and unit.endswith("ies"):
        unit = f"{unit[:-3]}y"
    elif number == 1 and unit.endswith(" calls"):
        unit = unit[:-1]
    return f"{_number(number)} {unit}"


def _number(value: Decimal | float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.2f}"


# ---- Control characters in names that come from models and users: shown, not obeyed.

_T = TypeVar("_T")
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(value: _T) -> _T:
    """Return the same value with every control character written out; also inside of lists, tables and dataclasses.

    These would move a terminal's cursor, begin a line, or colour or turn its text.
    """
    made: Any = value
    if isinstance(value, str):
        made = _CONTROLS.sub(_written_out, value)
    elif isinstance(value, dict):
        made = {printable(key): printable(entry) for key, entry in value.items()}
    elif isinstance(value, list | tuple):
        entries = (printable(entry) for entry in value)
        made = value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    elif is_dataclass(value) and not isinstance(value, type):
        made = replace(value, **{field.name: printable(getattr(value, field.name)) for field in fields(value)})
    return made  # type: ignore[no-any-return]


def printable_lines(text: str) -> str:
    """Return a text of our own with its control characters written out, line breaks excepted."""
    return "\n".join(printable(text.split("\n")))


def _written_out(found: re.Match[str]) -> str:
    sign = found[0]
    return _SHORT.get(sign) or (f"\\x{ord(sign):02x}" if ord(sign) < 0x100 else f"\\u{ord(sign):04x}")
