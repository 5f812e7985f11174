"""Loops of guarded functions: what each call did, as the rules see it, and rounds of calls that bring nothing new.

``calls/function_calls`` shows it every answer, and ``NoProgress`` the results in every request.
"""

import logging
import re
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from runguard.core.decision import Finding, Rungs
from runguard.core.events import FAILURES, ROOT_LANE, Answer, Outcome, ToolResults
from runguard.core.identity import answer_text, call_fingerprint, digest, mask
from runguard.core.outcomes import classify, failure_class, is_unfinished, named_items
from runguard.core.rules.repetition import Cycle
from runguard.providers.messages import TRANSFER, Reading, ToolResult, step_name

if TYPE_CHECKING:
    from runguard.calls.function_calls import Caller, GuardedCall

_log: Final = logging.getLogger("runguard")

# ---- Steps that bring nothing new.

Asked = tuple[str, object]  # a tool that the model asked for, and its arguments
_ASKED_AGAIN: Final = "the same request"


class NoProgress:
    """Counts rounds of steps in one run that call the same tools, whatever their arguments, and bring nothing new.

    One step is one answer of the model with all its tool calls. The caller runs the tools, and the next request holds
    their results. Nothing new is the same failure, the same empty or unfinished result, or the same request once more.
    Equal results that report success are a batch and count as progress.
    """

    __slots__ = ("_asked", "_cycle", "_mark", "_numbers")

    def __init__(self, repeats: int, max_cycle_len: int) -> None:
        self._cycle = Cycle(Rungs(stop=repeats), max_cycle_len)
        self._asked: tuple[Asked, ...] = ()  # by the last answer; empty once its results were seen
        self._mark: int | None = None  # of the request before
        self._numbers = count()

    @property
    def mark(self) -> int | None:
        """The mark of the last request: equal for two requests that say the same. None: not known."""
        return self._mark

    @property
    def waits_for_results(self) -> bool:
        """Whether the last answer asked for tools, so that the results in the next request count."""
        return bool(self._asked)

    def answered(self, calls: tuple[Asked, ...]) -> None:
        """Remember the tools that the model asks for.

        An answer that asks for none ends a turn: the next one starts a new count.
        """
        self._asked = calls
        if not calls:
            self._cycle.clear()

    def next_request(
        self, run: str, agent: str, at: float, results: list[ToolResult], mark: int | None
    ) -> Finding | None:
        """Look at the results of the tools that were asked for, before the next request is sent."""
        asked, self._asked = self._asked, ()
        is_again = mark is not None and mark == self._mark
        self._mark = mark
        if not asked:
            return None
        if results:
            return self.observe(run, agent, at, _matched(asked, results))
        return self._count(
            run,
            agent,
            at,
            [Answer(name, digest(name)) for name in (step_name(*one) for one in asked)],
            _ASKED_AGAIN if is_again else "",
        )

    def observe(self, run: str, agent: str, at: float, results: "list[tuple[ToolResult, object]]") -> Finding | None:
        """Count one step: its results, each with the arguments of its call."""
        results = [(result._replace(tool=step_name(result.tool, args)), args) for result, args in results]
        stale = [_nothing_new(result, args) for result, args in results]
        answers = [Answer(result.tool, digest(result.tool), result.value) for result, _ in results]
        return self._count(run, agent, at, answers, "\1".join(sorted(stale)) if all(stale) else "")

    def _count(self, run: str, agent: str, at: float, answers: list[Answer], what: str) -> Finding | None:
        """Count a step. ``what`` identifies one that brings nothing new; empty: it equals no other step."""
        step = int.from_bytes(digest(what)[:7]) if what else -1 - next(self._numbers)
        pairs = frozenset((answer.call, step) for answer in answers)
        return self._cycle.observe(ToolResults(run, "", agent, at, "", answers, pairs=pairs))


def _matched(asked: tuple[Asked, ...], results: list[ToolResult]) -> "list[tuple[ToolResult, object]]":
    """Return each result with the name and the arguments of its call: by name, or else by position."""
    left = list(asked)
    found: list[tuple[ToolResult, object]] = []
    for result in results:
        at = next((n for n, (name, _) in enumerate(left) if not result.tool or name == result.tool), None)
        name, args = left.pop(at) if at is not None else (result.tool, None)
        found.append((result if result.tool else result._replace(tool=name or asked[-1][0]), args))
    return found


def _nothing_new(result: ToolResult, args: Any) -> str:
    """Return what a result that brings nothing new is known by; empty for one that brings news."""
    value = result.value
    outcome, failure = classify(value)
    if result.is_error and outcome is Outcome.OK:
        outcome, failure = Outcome.FAILED, failure_class(answer_text(value))
    if outcome in FAILURES:
        return f"{result.tool}\0{failure}\0{named_items(args, value)}"
    if outcome is Outcome.EMPTY or failure or is_unfinished(value):
        return f"{result.tool}\0{mask(answer_text(value))}"
    return ""


# ---- What a call did, as the rules see it.

_PLAIN_NAME: Final = re.compile(r"[\w.:/#@+-]{1,64}")
# Why a model stopped, as providers and SDKs say it. As a signature it says nothing about the step.
_STOP_REASONS: Final = frozenset(
    {
        *("stop", "end_turn", "complete", "completed", "finished", "stop_sequence", "pause_turn", "eos", "eos_token"),
        *("length", "max_tokens", "max_output_tokens", "model_length", "incomplete"),
        *("content_filter", "refusal", "safety", "recitation", "guardrail_intervened"),
        *("tool_use", "tool_calls", "function_call"),
    }
)
_turns: Final = count()  # answers in words: none equals another


def watch_loops(call: "GuardedCall", reading: Reading, result: Any) -> None:
    """Show the loop rules what a call did."""
    caller, run = call.caller, call.state.run
    now = caller.guard.clock()
    signature, is_known = _signature(caller, reading, result)
    if not is_known:
        return
    # the user's signature is the whole identity of a step
    progress = call.state.progress if signature is None else None
    with call.state.lock:
        answers = _answers(call, reading, signature)
        if answers:
            caller.guard.after(ToolResults(run.info.run, ROOT_LANE, caller.name, now, "", answers))
        if progress is None or run.stopped is not None:
            return
        if not reading.results:
            progress.answered(reading.calls)
            return
        results = [(ToolResult(tool, value), args) for tool, args, value in reading.results]
        finding = progress.observe(run.info.run, caller.name, now, results)
        if finding is not None:
            caller.stop_run(call.state, finding)


def _signature(caller: "Caller", reading: Reading, result: Any) -> tuple[Any, bool]:
    """Return the caller's own name of a step, None where it gives none, and whether to check the step at all."""
    signature = reading.sig
    if caller.settings.signature is not None:
        try:
            signature = caller.settings.signature(result)
        except Exception:
            _log.warning(
                "runguard.signature_failed: signature raised for '%s'; the call is not checked for loops",
                caller.name,
                exc_info=True,
            )
            return None, False
        if signature is None:
            return None, False
    if _is_stop_reason(signature) and all(name != signature for name, _ in reading.calls):  # a tool may have this name
        return None, True
    return signature, True


def _is_stop_reason(signature: Any) -> bool:
    reason = signature.value if isinstance(signature, Enum) else signature
    if not isinstance(reason, str):
        return False
    reason = reason.lower().replace("-", "_")
    for prefix in ("finishreason.", "finish_reason_"):  # str() of an enum, and its name in a protocol
        reason = reason.removeprefix(prefix)
    return reason in _STOP_REASONS


def _answers(call: "GuardedCall", reading: Reading, signature: Any) -> list[Answer]:
    """Return what the call did, as the loop rule sees it: its signature, or the tools that the model asks for."""
    caller = call.caller
    if signature is not None:
        if signature == TRANSFER:  # the agents are the steps
            signature = next((step_name(*one) for one in reading.calls if one[0] == TRANSFER), signature)
        made = call_fingerprint("", {"sig": signature})
        # Anything but a plain name may be content, which must not appear in a trip, a log or an alert.
        plain = signature if isinstance(signature, str) and _PLAIN_NAME.fullmatch(signature) else ""
        return [Answer(plain or f"{caller.name}#{made.hex()[:8]}", made, reading.result)]
    if reading.results:
        return [
            Answer(step_name(tool, args), _call_id(caller, tool, args), value, args=args)
            for tool, args, value in reading.results
        ]
    if reading.calls:
        return [Answer(step_name(tool, args), _call_id(caller, tool, args)) for tool, args in reading.calls]
    if reading.sig is None and caller.settings.signature is None:
        return []
    # Beside steps with signatures an answer in words is a step too. It is news, unless the same request got the same.
    mark = call.state.progress.mark if call.state.progress is not None else None
    said = [mark, reading.text] if mark is not None and reading.text else next(_turns)
    return [Answer(f"{caller.name}#words", call_fingerprint("", {"words": said}))]


def _call_id(caller: "Caller", tool: str, args: Any) -> bytes:
    return call_fingerprint(step_name(tool, args), {} if caller.settings.by == "name" else args)
