"""A guarded function: its settings, what its calls may cost, which of them may start, and what their loops look like.

``calls/functions`` reads the keywords of ``guard`` with ``settings_of``. ``calls/function_calls`` asks ``Costs`` for
the most that a call can take, and gives a ``Ticket`` to a call of unknown cost.
"""

import asyncio
import inspect
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from runguard.core.decision import Finding, Rungs
from runguard.core.errors import PolicyError, did_you_mean
from runguard.core.events import FAILURES, ROOT_LANE, Answer, Outcome, ToolResults
from runguard.core.identity import answer_text, call_fingerprint, digest, mask
from runguard.core.money import Budget, shown, stated_nano
from runguard.core.outcomes import classify, failure_class, is_unfinished, named_items
from runguard.core.rules.repetition import Cycle
from runguard.engine.charges import Charge
from runguard.engine.waiting import Turns
from runguard.policy.settings import RULES, Policy
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.providers.messages import TRANSFER, Reading, Request, ToolResult, step_name

if TYPE_CHECKING:
    from runguard.calls.function_calls import Caller, LayerCall

_log: Final = logging.getLogger("runguard")

# ---- Settings: the keywords of ``guard``, ``guard_async`` and ``run``.


_AMOUNTS: Final = {"max_usd": "usd", "max_tokens": "tokens", "max_calls": "calls"}
_WINDOWS: Final = {"per_minute": "1m", "per_hour": "1h", "per_day": "1d", "per_week": "1w", "per_month": "month"}
# Settings of the policy that have their own place here.
ELSEWHERE: Final = {
    "cycle_repeats": "loop.repeats",
    "max_cycle_len": "loop.max_cycle_len",
    "max_context_tokens": "context.max_context_tokens",
    "context_headroom": "context.headroom",
    "max_tool_failures": "breaker.failures",
    "half_open_reset_seconds": "breaker.reset_seconds",
}
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
ONLY_AGENTS: Final = frozenset(
    {
        "rules",
        "max_tool_calls",
        "max_reentries",
        "max_delegation_depth",
        "remote_agents",
        "trust_remote_budget",
        "final_answer",
        "budget_notice",
    }
)
LOOP_BY: Final = ("result", "call", "name")
_REPEATS, _LENGTH, _FAILURES, _RESET_S = 3, 4, 5, 60.0


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The settings of one wrapped callable."""

    policy: Policy
    loop: bool
    by: str  # what makes two steps of a loop equal: one of LOOP_BY
    context: bool
    breaker: bool
    tokens: Callable[..., Any] | None
    signature: Callable[[Any], Any] | None
    fixed_cost: int | None  # nano-USD of every call
    cost_of_tokens: Callable[[int, int], Any] | None
    cost_of_result: Callable[[Any], Any] | None
    in_usd: bool  # some budget counts dollars
    in_tokens: bool


def settings_of(
    *,
    budget: Mapping[str, Any] | Budget | Sequence[Budget] | None,
    loop: Mapping[str, Any] | bool | None,
    context: Mapping[str, Any] | None,
    breaker: Mapping[str, Any] | bool | None,
    tokens: Callable[..., Any] | None,
    signature: Callable[[Any], Any] | None,
    cost: Any,
    policy: Mapping[str, Any],
) -> GuardSettings:
    """Build the settings from keywords. Raise ``PolicyError`` for invalid ones, before the first call."""
    for name in policy:
        if name in ELSEWHERE:
            section, _, setting = ELSEWHERE[name].partition(".")
            raise PolicyError(f"{name}: use {section}={{{setting!r}: …}}")
        if name in ONLY_AGENTS:
            raise PolicyError(
                f"{name}: applies to agents and their tools, which a guarded function does not see; use loop=, "
                "context= or breaker="
            )
    keywords: dict[str, Any] = {**policy, "max_tool_calls": None, "max_delegation_depth": None}
    by: Any = LOOP_BY[0]
    watches_loops = loop is not None and loop is not False
    if watches_loops:
        values = _read("loop", {} if loop is True else loop, ("repeats", "max_cycle_len", "by"))
        by = values.get("by", by)
        if by not in LOOP_BY:
            raise PolicyError(f"loop.by = {by!r}: give one of {', '.join(repr(known) for known in LOOP_BY)}")
        keywords["cycle_repeats"] = values.get("repeats", _REPEATS)
        keywords["max_cycle_len"] = values.get("max_cycle_len", _LENGTH)
    if context is not None:
        values = _read("context", context, ("max_context_tokens", "headroom"))
        keywords["max_context_tokens"] = values.get("max_context_tokens")
        keywords["context_headroom"] = values.get("headroom")
    has_breaker = breaker is not None and breaker is not False
    if has_breaker:
        values = _read("breaker", {} if breaker is True else breaker, ("failures", "reset_seconds"))
        keywords["max_tool_failures"] = values.get("failures", _FAILURES)
        keywords["half_open_reset_seconds"] = values.get("reset_seconds", _RESET_S)
    if budget is not None:
        keywords["budgets"] = [*(policy.get("budgets") or ()), *_budgets(budget)]
    # The rules about tools need answers that a plain callable does not have. Only cycles of signatures can be seen.
    seen = {"cycle", "resubmission", *(["context"] if context is not None else [])}
    keywords["rules"] = dict.fromkeys(RULES.keys() - seen, False)
    for name, function in (("tokens", tokens), ("signature", signature)):
        if function is not None and not callable(function):
            raise PolicyError(f"{name} = {function!r}: give a function")
    try:
        built = Policy.build(**keywords)
    except PolicyError as error:  # name the settings as the user wrote them
        raise PolicyError(
            re.sub(r"\b(?:" + "|".join(ELSEWHERE) + r")\b", lambda found: ELSEWHERE[found[0]], str(error))
        ) from None
    usd, counted = _counted(built)
    return GuardSettings(
        built, watches_loops, by, context is not None, has_breaker, tokens, signature, *_costs(cost), usd, counted
    )


def _counted(policy: Policy) -> tuple[bool, bool]:
    """Return whether dollars, and whether tokens are limited by anything."""
    budgets = policy.budgets
    return (
        policy.max_usd is not None or any(b.usd is not None for b in budgets),
        policy.max_tokens is not None or any(b.tokens is not None for b in budgets),
    )


def _budgets(given: object) -> list[Budget]:
    if isinstance(given, Budget):
        return [given]
    if not isinstance(given, Mapping):
        if isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, Budget) for one in given):
            return list(given)
        raise PolicyError(f"budget = {given!r}: give {{'max_usd': 2.0}}, or a Budget, or a list of them")
    values = _read("budget", given, (*_AMOUNTS, *_WINDOWS))
    budgets = []
    flat = {_AMOUNTS[key]: value for key, value in values.items() if key in _AMOUNTS and value is not None}
    if flat:
        budgets.append(_budget("budget", flat, per="run"))
    for key, window in _WINDOWS.items():
        value = values.get(key)
        if value is None:
            continue
        amounts = _read(f"budget.{key}", value, _AMOUNTS) if isinstance(value, Mapping) else {"max_usd": value}
        limits = {_AMOUNTS[name]: amount for name, amount in amounts.items() if amount is not None}
        if not limits:
            raise PolicyError(f"budget.{key} = {value!r}: limits nothing; give {', '.join(_AMOUNTS)}")
        budgets.append(_budget(f"budget.{key}", limits, per="app", window=window))
    return budgets


def _budget(where: str, amounts: dict[str, Any], **more: Any) -> Budget:
    try:
        return Budget(**amounts, **more)
    except PolicyError as error:  # name the setting as the user wrote it
        unit, _, fault = str(error).partition(" = ")
        name = next((name for name, known in _AMOUNTS.items() if known == unit), None)
        raise PolicyError(f"{where}.{name} = {fault}" if name is not None else f"{where}: {error}") from None


def _costs(cost: Any) -> tuple[int | None, Callable[[int, int], Any] | None, Callable[[Any], Any] | None]:
    """Read ``cost=``: a number for every call, a function of input and output tokens, or one of the result."""
    if cost is None:
        return None, None, None
    if not callable(cost):
        fixed = stated_nano(cost)
        if fixed is None:
            raise PolicyError(
                f"cost = {cost!r}: give dollars per call, a function of the result, or one of input and output tokens"
            )
        return fixed, None, None
    try:
        needed = [
            p
            for p in inspect.signature(cost).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # a built-in without a signature
        return None, None, cost
    if len(needed) == 2:
        return None, cost, None
    if len(needed) > 2:
        raise PolicyError(
            f"cost takes {len(needed)} arguments: give a number, a function of the result, or one of input and "
            "output tokens"
        )
    return None, None, cost


def _read(where: str, given: object, known: Iterable[str]) -> dict[str, Any]:
    """Read a mapping with known keys, in snake or camel case."""
    names = list(known)
    if not isinstance(given, Mapping):
        raise PolicyError(f"{where} = {given!r}: give a mapping with {', '.join(names)}")
    values = {}
    for key, value in given.items():
        name = _CAMEL.sub("_", key).lower() if isinstance(key, str) else key
        if name not in names:
            raise PolicyError(f"{where}.{key}: no such setting; {did_you_mean(str(name), names)}")
        if name in values:
            raise PolicyError(f"{where}.{key}: given twice")
        values[name] = value
    return values


# ---- Costs.

_MOST_ROUNDS: Final = 100  # requests of one call for which a bound is computed
ENOUGH_SEEN: Final = 64  # calls after which the highest cost so far counts as the most that one costs
_LONGEST: Final = 10**9  # tokens, beyond every prompt and answer
_FAR_HIGHER: Final = 2  # times the highest cost so far: then the count of known costs starts again


class Costs:
    """What calls of one callable may cost, did cost, and the highest cost so far.

    The figures come from its keywords, the price list and its own calls.
    """

    def __init__(self, name: str, settings: GuardSettings, pricing: Pricing, clock: Callable[[], float]) -> None:
        self._name, self._settings, self._pricing, self._clock = name, settings, pricing, clock
        # nano-USD, tokens
        self._unknown: tuple[int | None, int | None] = (
            None if settings.in_usd else 0,
            None if settings.in_tokens else 0,
        )
        # the highest cost so far; and the same once there were enough calls to rely on it
        self.highest = self._relied_on = self._unknown
        # whether what calls cost says anything new: not where the user has fixed it
        self.learns = settings.in_tokens or (settings.in_usd and settings.fixed_cost is None)
        self._seen = 0  # calls with a known cost, since one was far more expensive than all before
        self._lock = threading.Lock()

    @property
    def width(self) -> int:
        """The number of calls of unknown cost that may run at once: half as many as have reported their cost."""
        return max(self._seen // 2, 1)

    def bound(
        self, request: Request, otherwise: tuple[int | None, int | None] | None = None
    ) -> tuple[int | None, int | None]:
        """Return the most that a call can take, nano-USD and tokens; None: unknown.

        ``otherwise``: the figures for units without a bound, by default the highest cost of many calls.
        """
        settings, known, most = self._settings, request.input_tokens, request.max_output_tokens
        usd, tokens = otherwise or self._relied_on
        if request.rounds > 1:
            return self._of_rounds(request, (usd, tokens))
        if settings.in_tokens and known is not None and most is not None:
            tokens = known + most
        if not settings.in_usd:
            return usd, tokens
        if settings.fixed_cost is not None:
            return settings.fixed_cost, tokens
        if known is not None and most is not None:
            if settings.cost_of_tokens is not None:
                nano = self.ask(settings.cost_of_tokens, known, most)
                return (usd if nano is None else nano), tokens
            rates = self._pricing.rates(request.model, self._clock()) if request.model else None
            if isinstance(rates, Rates) and settings.cost_of_result is None:
                return rates.worst(known, most, request.audio_tokens), tokens
        return usd, tokens

    def expected(self, request: Request) -> tuple[int | None, int | None]:
        """Return the most that a call can take, or else the highest cost so far; None before the first call."""
        return self.bound(request, self.highest)

    def least(self, request: Request) -> tuple[int, int]:
        """Return what must be left for a call."""
        usd, tokens = self.expected(request)
        return usd or 0, tokens or 0

    def of_model(self, request: Request) -> tuple[int, int] | None:
        """Return the most that any call of the request's model can take; None: unknown.

        That is its longest answer to this prompt, or to the longest prompt that it accepts.
        """
        settings = self._settings
        if (
            not request.model
            or request.rounds > 1
            or settings.fixed_cost is not None
            or settings.cost_of_tokens is not None
            or settings.cost_of_result is not None
        ):
            return None
        rates = self._pricing.rates(request.model, self._clock())
        if settings.in_usd and not isinstance(rates, Rates):
            return None
        if isinstance(rates, Rates) and not settings.in_tokens and not rates.worst(_LONGEST, _LONGEST, _LONGEST):
            return 0, 0  # it is free, however long
        window, most = self._pricing.limits(request.model)
        prompt = window if request.input_tokens is None else request.input_tokens
        most = most if request.max_output_tokens is None else request.max_output_tokens
        if prompt is None or most is None:
            return None
        audio = prompt if request.input_tokens is None else request.audio_tokens
        return (rates.worst(prompt, most, audio) if isinstance(rates, Rates) else 0), prompt + most

    def _of_rounds(self, request: Request, otherwise: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
        """Return the most that a call can take when the client may make several requests for it.

        Each prompt holds the answers before it and what functions returned. The length of a function's result is
        unknown: it is assumed to be as long as the longest answer.
        """
        settings, (usd, tokens), (highest, longest) = self._settings, otherwise, self.highest
        known, most, rounds = request.input_tokens, request.max_output_tokens, request.rounds
        if settings.fixed_cost is not None:
            usd = settings.fixed_cost if settings.in_usd else usd
        if known is None or most is None or rounds > _MOST_ROUNDS:
            return usd, tokens
        prompts = [known + 2 * most * before for before in range(rounds)]
        if settings.in_tokens:
            tokens = max(longest or 0, sum(prompts) + most * rounds)
        if not settings.in_usd or settings.fixed_cost is not None or settings.cost_of_result is not None:
            return usd, tokens
        bound: int | None = None
        if settings.cost_of_tokens is not None:
            bound = self.ask(settings.cost_of_tokens, sum(prompts), most * rounds)
        elif isinstance(rates := self._pricing.rates(request.model, self._clock()) if request.model else None, Rates):
            bound = sum(rates.worst(prompt, most, request.audio_tokens) for prompt in prompts)
        return (usd if bound is None else max(highest or 0, bound)), tokens

    def of(self, reading: Reading, usage: Usage | None, result: Any) -> int | None:
        settings = self._settings
        if settings.fixed_cost is not None:
            return settings.fixed_cost
        if settings.cost_of_result is not None:
            return self.ask(settings.cost_of_result, result)
        if settings.cost_of_tokens is not None and usage is not None:
            return self.ask(settings.cost_of_tokens, usage.input, usage.output)
        return None if reading.usd is None else stated_nano(reading.usd)

    def ask(self, cost: Callable[..., Any], *facts: Any) -> int | None:
        try:
            nano = stated_nano(value := cost(*facts))
        except Exception:
            _log.warning("runguard.cost_failed: cost raised for '%s'", self._name, exc_info=True)
            return None
        if nano is None:
            _log.warning(
                "runguard.cost_failed: cost gave %s for '%s', which is not an amount in dollars",
                shown(value),
                self._name,
            )
        return nano

    def learn(self, nano: int | None, tokens: int) -> None:
        """Remember what a call has cost. ``nano`` None: unknown in dollars."""
        cost = (nano if self._settings.in_usd else 0), (tokens if self._settings.in_tokens else 0)
        dearest, longest = self.highest
        if (
            self._relied_on is self.highest
            and cost[0] is not None
            and dearest is not None
            and longest is not None
            and cost[0] <= dearest
            and cost[1] <= longest
        ):
            return  # not higher
        with self._lock:
            if any(
                one is not None and before is not None and one > before * _FAR_HIGHER
                for one, before in zip(cost, self.highest, strict=True)
            ):
                self._seen = 0
            usd, most = (
                before if one is None else max(before or 0, one) for one, before in zip(cost, self.highest, strict=True)
            )
            self.highest = usd, most
            if usd is not None and most is not None:
                self._seen += 1
            # Free calls do not show what paid ones cost.
            is_enough = (
                self._seen >= ENOUGH_SEEN
                and (usd or not self._settings.in_usd)
                and (most or not self._settings.in_tokens)
            )
            self._relied_on = self.highest if is_enough else self._unknown


# ---- Calls whose cost is known only afterwards: they take turns.


class Ticket:
    """One call among those of its function that take turns, because their cost is known only afterwards.

    The first calls run one at a time. As calls return and show what one costs, more and more run at once.
    """

    __slots__ = ("_loop", "_pid", "_task", "_thread", "around", "charge", "is_alone", "known")

    def __init__(self, around: frozenset[int]) -> None:
        """``around``: calls with tickets of other functions that the call is inside of."""
        self._pid, self._thread, self._loop = os.getpid(), threading.get_ident(), asyncio._get_running_loop()
        # weak: a task that is thrown away gives its ticket back
        self._task = None if (task := _task()) is None else weakref.ref(task)
        self.around = around
        self.charge: Charge | None = None
        self.is_alone = False  # nothing else is running: it holds the whole remainder
        self.known = (0, 0)  # nano-USD and tokens that it must hold at least

    def cannot_wait_for(self, others: Collection["Ticket"], no_loop: bool) -> bool:
        """Return whether the running calls might never end while this one waits.

        That is so if the same thread or task made all of them and still reads their answers, and if one may itself wait
        for the call that this one is inside of.
        """
        is_apart = bool(self.around) and any(not self.around & other.around for other in others)
        return is_apart or all(other._is_stuck_with(no_loop) for other in others)

    def _is_stuck_with(self, no_loop: bool) -> bool:
        if self._thread != threading.get_ident():
            return False
        return no_loop or self._task is None or self._task() is _task()

    @property
    def is_lost(self) -> bool:
        """Whether the call can never end: it belongs to a parent process, or its event loop is closed."""
        return self._pid != os.getpid() or (self._loop is not None and self._loop.is_closed())


def turns_of(most_seconds: float) -> Turns[Ticket]:
    """Return the turns of one function. After ``most_seconds`` nothing waits for a call that never ended."""
    return Turns(1, lambda ticket, since: ticket.is_lost or since < time.monotonic() - most_seconds)


def _task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


# ---- Loops of guarded functions: what each call did, as the rules see it, and rounds of calls that bring nothing
#      new.
#
# ``calls/function_calls`` shows it every answer, and ``NoProgress`` the results in every request.

# ---- Steps that bring nothing new.

Asked = tuple[str, object]  # a tool that the model asked for, and its arguments
_ASKED_AGAIN: Final = "the same request"


class NoProgress:
    """Counts rounds of steps in one run that call the same tools, whatever their arguments, and bring nothing new.

    One step is one answer of the model with all its tool calls. The caller runs the tools, and the next request holds
    their results. Nothing new is the same failure, the same empty or unfinished result, or the same request once more.
    Equal results that report success are a batch and count as progress.
    """

    __slots__ = ("_asked", "_cycle", "_numbers", "mark")

    def __init__(self, repeats: int, max_cycle_len: int) -> None:
        self._cycle = Cycle(Rungs(stop=repeats), max_cycle_len)
        self._asked: tuple[Asked, ...] = ()  # by the last answer; empty once its results were seen
        # of the last request: equal for two requests that say the same. None: not known
        self.mark: int | None = None
        self._numbers = count()

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
        is_again = mark is not None and mark == self.mark
        self.mark = mark
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


def watch_loops(call: "LayerCall", reading: Reading, result: Any) -> None:
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


def _answers(call: "LayerCall", reading: Reading, signature: Any) -> list[Answer]:
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
