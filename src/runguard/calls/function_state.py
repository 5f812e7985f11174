"""What is known about a guarded function between its calls.

``Caller`` is one guarded function. It has its settings, its state in each run, its costs and the queue of its calls.
``calls/functions`` creates it, and ``calls/function_calls`` opens and books its calls. ``RunContext`` is the block of
``runguard.run()``: guarded functions and ``calls/run`` join it. ``drive`` runs a coroutine for synchronous callers.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import Enum, auto
from itertools import count
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from runguard.background import FINALIZED, start_thread
from runguard.core.breaker import Permit
from runguard.core.decision import Finding, Rungs, Trip
from runguard.core.errors import PolicyError, RunStoppedError, nearest
from runguard.core.events import FAILURES, ROOT_LANE, Answer, ModelCall, Outcome, RunInfo, ToolResults
from runguard.core.identity import answer_text, digest, mask
from runguard.core.money import Budget, BudgetStatus, shown, stated_nano
from runguard.core.outcomes import classify, failure_class, is_unfinished, named_items
from runguard.core.rules.repetition import Cycle
from runguard.engine.charges import OWNERS, Charge, scopes_of
from runguard.engine.guard import Controls, Guard
from runguard.engine.runs import Run
from runguard.policy.settings import RULES, Policy
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.providers.messages import (
    Reading,
    Request,
    ToolResult,
    newest_results,
    read_request,
    request_mark,
    step_name,
)
from runguard.providers.usage import GrowingPrompts

_log: Final = logging.getLogger("runguard")

# ---- Settings: the keywords of ``guard``, ``guard_async`` and ``run``.


_AMOUNTS: Final = {"max_usd": "usd", "max_tokens": "tokens", "max_calls": "calls"}
_WINDOWS: Final = {"per_minute": "1m", "per_hour": "1h", "per_day": "1d", "per_week": "1w", "per_month": "month"}
# Settings of the policy that have their own place here.
_PLACES: Final = {
    "cycle_repeats": "loop.repeats",
    "max_cycle_len": "loop.max_cycle_len",
    "max_context_tokens": "context.max_context_tokens",
    "context_headroom": "context.headroom",
    "max_tool_failures": "breaker.failures",
    "half_open_reset_seconds": "breaker.reset_seconds",
}
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_NOT_HERE: Final = frozenset(
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
        if name in _PLACES:
            section, _, setting = _PLACES[name].partition(".")
            raise PolicyError(f"{name}: use {section}={{{setting!r}: …}}")
        if name in _NOT_HERE:
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
        keywords["budgets"] = _budgets(budget)
    # The rules about tools need answers that a plain callable does not have. Only cycles of signatures can be seen.
    keywords["rules"] = {
        rule: False for rule in RULES if rule not in ("cycle", "context") or (rule == "context" and context is None)
    }
    for name, function in (("tokens", tokens), ("signature", signature)):
        if function is not None and not callable(function):
            raise PolicyError(f"{name} = {function!r}: give a function")
    try:
        built = Policy.build(**keywords)
    except PolicyError as error:  # name the settings as the user wrote them
        raise PolicyError(
            re.sub(r"\b(?:" + "|".join(_PLACES) + r")\b", lambda found: _PLACES[found[0]], str(error))
        ) from None
    usd, counted = _counted(built)
    return GuardSettings(
        built, watches_loops, by, context is not None, has_breaker, tokens, signature, *_costs(cost), usd, counted
    )


def _counted(policy: Policy) -> tuple[bool, bool]:
    """Whether dollars, and whether tokens are limited by anything."""
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
    """A number for every call, a function of input and output tokens, or one of the result."""
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
    """A mapping with known keys, in snake or camel case."""
    names = list(known)
    if not isinstance(given, Mapping):
        raise PolicyError(f"{where} = {given!r}: give a mapping with {', '.join(names)}")
    values = {}
    for key, value in given.items():
        name = _CAMEL.sub("_", key).lower() if isinstance(key, str) else key
        if name not in names:
            raise PolicyError(f"{where}.{key}: no such setting; {nearest(str(name), names)}")
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
        """How many calls of unknown cost may run at once: half as many as have reported their cost."""
        return max(self._seen // 2, 1)

    def bound(
        self, request: Request, otherwise: tuple[int | None, int | None] | None = None
    ) -> tuple[int | None, int | None]:
        """The most that a call can take, nano-USD and tokens; None: unknown.

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
        """The most that a call can take, or else the highest cost so far; None before the first call."""
        return self.bound(request, self.highest)

    def of_model(self, request: Request) -> tuple[int, int] | None:
        """The most that any call of the request's model can take; None: unknown.

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
        """The most that a call can take when the client may make several requests for it.

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
        return stated_nano(reading.usd)

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
        """A call returned with its cost. ``nano`` None: unknown in dollars."""
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
            # Calls that cost nothing say nothing about those that do.
            is_enough = (
                self._seen >= ENOUGH_SEEN
                and (usd or not self._settings.in_usd)
                and (most or not self._settings.in_tokens)
            )
            self._relied_on = self.highest if is_enough else self._unknown


# ---- The queue of calls whose cost is known only afterwards.


class Admission(Enum):
    """When a call may ask for its reservation."""

    NOW = auto()
    ALONGSIDE = auto()  # at once, although others are running: it cannot wait for them
    QUEUED = auto()  # when its ticket is done


class Ticket(Future[None]):
    """One call's place. Done when the call may start; given back when it has ended."""

    def __init__(self, around: frozenset[int]) -> None:
        super().__init__()
        self.pid, self.thread, self.loop = os.getpid(), threading.get_ident(), asyncio._get_running_loop()
        # weak: a task that is thrown away gives its ticket back
        self._task = None if (task := _task()) is None else weakref.ref(task)
        self.around = around  # calls with tickets of other callables that this call is inside of
        self.charge: Charge | None = None
        self.is_alone = False  # nothing else is running: it holds the whole remainder
        self.known = (0, 0)  # nano-USD and tokens that it must hold at least
        self.since = 0.0

    def is_stuck_with(self, no_loop: bool) -> bool:
        """Whether this call cannot end while the caller waits.

        That is so if the same thread or task made it and still reads its answer.
        """
        if self.thread != threading.get_ident():
            return False
        return no_loop or self._task is None or self._task() is _task()

    @property
    def is_lost(self) -> bool:
        """Whether the call can never end: it belongs to a parent process, or its event loop is closed."""
        return self.pid != os.getpid() or (self.loop is not None and self.loop.is_closed())


class CallQueue:
    """The running and the waiting calls of one callable. Safe to use from many threads and event loops.

    The first calls run one at a time. As calls return and show what one costs, more and more run at once. The others
    wait, first come, first served.
    """

    def __init__(self, width: Callable[[], int], most_seconds: float) -> None:
        """``width``: how many calls may run at once.

        ``most_seconds``: after this time nothing waits for a call that never ended.
        """
        self._width, self._most_seconds = width, most_seconds
        self._lock = threading.RLock()  # the collector may throw a task away, and give its ticket back, at any time
        self.running: dict[Ticket, None] = {}
        self.waiting: deque[Ticket] = deque()

    def ask(self, around: frozenset[int], no_loop: bool) -> tuple[Admission, Ticket | None]:
        ticket = Ticket(around)
        with self._lock:
            if self.waiting or len(self.running) >= self._width():
                self._drop_lost_locked()
            if not self.waiting and len(self.running) < self._width():
                self._start_locked(ticket)
                return Admission.NOW, ticket
            # a running call may be waiting for the call that this one is inside of
            apart = bool(around) and any(not around & other.around for other in self.running)
            if apart or all(other.is_stuck_with(no_loop) for other in self.running):
                return Admission.ALONGSIDE, None
            self.waiting.append(ticket)
            return Admission.QUEUED, ticket

    def give_back(self, ticket: Ticket) -> None:
        """The call has ended, or will not be made."""
        with self._lock:
            self.running.pop(ticket, None)
            if ticket in self.waiting:
                self.waiting.remove(ticket)
            while self.waiting:
                self._drop_lost_locked()
                if not self.waiting or len(self.running) >= self._width():
                    break
                self._start_locked(self.waiting.popleft())

    def alone(self) -> Ticket | None:
        """The call that holds the whole remainder, if there is one."""
        with self._lock:
            return next((ticket for ticket in self.running if ticket.is_alone), None)

    def _start_locked(self, ticket: Ticket) -> None:
        ticket.is_alone, ticket.since = self._width() == 1, time.monotonic()
        self.running[ticket] = None
        ticket.set_result(None)

    def _drop_lost_locked(self) -> None:
        """Forget calls that can never end, and calls that have run for too long to be waited for."""
        longest = time.monotonic() - self._most_seconds
        for ticket in [ticket for ticket in self.running if ticket.since < longest or ticket.is_lost]:
            self.running.pop(ticket, None)
        while self.waiting and self.waiting[0].is_lost:
            self.waiting.popleft()


def _task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def may_start(ticket: Ticket, seconds: float) -> bool:
    """Wait in the queue, at most this long. Giving up does not disturb others."""
    if not ticket.done():
        await asyncio.wait((asyncio.wrap_future(ticket),), timeout=seconds)
    return ticket.done()


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
        """Of the last request: equal for two requests that say the same. None: not known."""
        return self._mark

    @property
    def waits_for_results(self) -> bool:
        """Whether the last answer asked for tools, so that the results in the next request count."""
        return bool(self._asked)

    def answered(self, calls: tuple[Asked, ...]) -> None:
        """The model answered and asks for these tools.

        An answer that asks for none ends a turn: the next one starts a new count.
        """
        self._asked = calls
        if not calls:
            self._cycle.clear()

    def next_request(
        self, run: str, agent: str, at: float, results: list[ToolResult], mark: int | None
    ) -> Finding | None:
        """The caller is about to send the next request, with these results of the tools that were asked for."""
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
        """One step: its results, each with the arguments of its call."""
        results = [(result._replace(tool=step_name(result.tool, args)), args) for result, args in results]
        stale = [_nothing_new(result, args) for result, args in results]
        answers = [Answer(result.tool, digest(result.tool), result.value) for result, _ in results]
        return self._count(run, agent, at, answers, "\1".join(sorted(stale)) if all(stale) else "")

    def _count(self, run: str, agent: str, at: float, answers: list[Answer], what: str) -> Finding | None:
        """``what`` identifies a step that brings nothing new; empty: it brings news, so it equals no other step."""
        step = int.from_bytes(digest(what)[:7]) if what else -1 - next(self._numbers)
        pairs = frozenset((answer.call, step) for answer in answers)
        return self._cycle.observe(ToolResults(run, "", agent, at, "", answers, pairs=pairs))


def _matched(asked: tuple[Asked, ...], results: list[ToolResult]) -> "list[tuple[ToolResult, object]]":
    """Each result with the name and the arguments of its call: by name, or else by position."""
    left = list(asked)
    found: list[tuple[ToolResult, object]] = []
    for result in results:
        at = next((n for n, (name, _) in enumerate(left) if not result.tool or name == result.tool), None)
        name, args = left.pop(at) if at is not None else (result.tool, None)
        found.append((result if result.tool else result._replace(tool=name or asked[-1][0]), args))
    return found


def _nothing_new(result: ToolResult, args: Any) -> str:
    """What a result that brings nothing new is known by; empty for one that brings news."""
    value = result.value
    outcome, failure = classify(value)
    if result.is_error and outcome is Outcome.OK:
        outcome, failure = Outcome.FAILED, failure_class(answer_text(value))
    if outcome in FAILURES:
        return f"{result.tool}\0{failure}\0{named_items(args, value)}"
    if outcome is Outcome.EMPTY or failure or is_unfinished(value):
        return f"{result.tool}\0{mask(answer_text(value))}"
    return ""


# ---- Which run the guarded calls belong to.


@dataclass(slots=True, eq=False)
class RunState:
    """What one caller knows about one run."""

    run: Run
    lock: threading.Lock = field(default_factory=threading.Lock)
    until: float | None = None  # when the period of the budget that stopped the run ends
    progress: NoProgress | None = None  # None: loops are not compared by results
    prompts: GrowingPrompts = field(default_factory=GrowingPrompts)


class RunContext:
    """``with runguard.run(...)``: the owner of the run, and what the callers know about it until it ends."""

    def __init__(
        self,
        app: str = "",
        user: str = "",
        session: str = "",
        labels: Mapping[str, str] | None = None,
        caller: "Caller | None" = None,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.app, self.user, self.session, self.labels, self.caller = app, user, session, labels, caller
        self.outer: RunContext | None = None
        self.states: dict[Caller, RunState] = {}
        self.agents: dict[Guard, AgentsState] = {}
        self.kept: dict[str, Kept] = {}  # by adapter: what it keeps from call to call in this block
        self.lock = threading.RLock()
        self.ended = False
        # every run that began here and is no part of another one here, for the bill
        self._billed: list[tuple[Guard, Run]] = []

    def bill(self, guard: Guard, run: Run) -> None:
        """Put a run on the bill of this block. Calls inside a call that is on it are there already."""
        is_inside = any(not (charge.over or charge.is_tool) for charge in OWNERS.get())
        if not is_inside and all(known is not run for _, known in self._billed):
            self._billed.append((guard, run))

    def end(self) -> None:
        with self.lock:
            self.ended = True
        for kept in list(self.kept.values()):
            kept.end()
        self.kept.clear()
        for caller, state in list(self.states.items()):
            caller.guard.faults.attempt("end of run", caller.guard.end, state.run.info.run)
        self.states.clear()
        for guard, agents in list(self.agents.items()):
            guard.faults.attempt("end of run", agents.end, guard)
        self.agents.clear()

    @property
    def _runs(self) -> "list[tuple[Guard, Run]]":
        """The runs whose figures add up. Limits of the block itself count every call in it."""
        own = self.caller.guard if self.caller is not None else None
        return [one for one in self._billed if one[0] is own] or self._billed

    @property
    def usd(self) -> Decimal | None:
        """What the calls in the block have cost so far, in dollars; None where no price is known."""
        costs = [run.run_costs.spent_usd for _, run in self._runs]
        known = [usd for usd in costs if usd is not None]
        return sum(known, Decimal()) if known or not costs else None

    @property
    def tokens(self) -> int:
        """The tokens of these calls, input and output."""
        return self._total("tokens")

    @property
    def calls(self) -> int:
        """The model calls that were sent."""
        return self._total("calls")

    def _total(self, figure: str) -> int:
        return sum(guard.accounts.spending.of_run(run.run_costs)[figure] for guard, run in self._runs)

    @property
    def trips(self) -> list[Trip]:
        """What RunGuard stopped here, oldest first."""
        found = {trip.id: trip for _, run in self._billed for trip in run.trips}
        return sorted(found.values(), key=lambda trip: trip.at)


class Kept(Protocol):
    """What an adapter keeps for a block of ``runguard.run()``."""

    def end(self) -> None:
        """The block ends."""


@dataclass(slots=True, eq=False)
class AgentsState:
    """The run of all agents of one guard in one block, and under which keys it will be kept when the block ends."""

    run: Run
    lanes: Iterator[int] = field(default_factory=lambda: count(1))
    keys: tuple[str, ...] = ()
    waits: bool = False

    def end(self, guard: Guard) -> None:
        if guard.runs.get(self.run.info.run) is not self.run:
            return
        if self.keys:
            guard.pauses.keep(self.run.info.run, waits=self.waits, keys=self.keys)
        else:
            guard.end(self.run.info.run)


class Surroundings(NamedTuple):
    """What surrounds a guarded call."""

    run: RunContext | None = None
    # The guard directly inside the one that calls now. It is removed when it is called: the runs around both have
    # already admitted that call, but not a second attempt of a retry between the two.
    inner: "list[Caller] | None" = None
    place: object = None  # the tool call of a guarded agent around it: a ``runguard.calls.model_calls.Place``


_NONE: Final = Surroundings()
SURROUNDINGS: Final[ContextVar[Surroundings]] = ContextVar("runguard_surroundings", default=_NONE)

# ---- One guarded callable and its calls.

NO_REQUEST: Final = Request()
_NAME_CHARS: Final = 120
_START_AGAIN: Final = "reset() or a new run starts again from zero"
_ADVICE: Final = {
    "cycle": f"{_START_AGAIN}; to allow more, raise loop={{'repeats': …}}, set loop={{'by': 'call'}} to compare "
    "arguments alone, or give None as the signature of calls that may repeat",
    "unpriced": f"return {{'usd': …}}, give cost= or prices=, or set on_unpriced='tokens'; {_START_AGAIN}",
    "breaker": "wait until retry_after has passed: then one call is tried",
    "context": f"send less, then {_START_AGAIN}; to allow more, raise context={{'max_context_tokens': …}}",
    "deadline": f"{_START_AGAIN}; to allow more, raise max_seconds",
    "model_calls": f"{_START_AGAIN}; to allow more, raise max_model_calls",
}


class _Forks:
    """How often this process was forked off from another one since this module was imported."""

    count = 0

    def add(self) -> None:
        self.count += 1


_forks: Final = _Forks()
if hasattr(os, "register_at_fork"):  # asking for the number of the process would cost a system call for every call
    os.register_at_fork(after_in_child=_forks.add)


class Caller(Controls):
    """One wrapped callable, or the limits of one ``run``: its guard, its state in each run, and its calls."""

    def __init__(self, name: str, settings: GuardSettings) -> None:
        self.name, self.settings = name[:_NAME_CHARS], settings
        self.guard = Guard(settings.policy, breaker_runs=1, advice=_ADVICE)
        self.guard.check_store()
        self.is_off = settings.policy.mode == "off"
        self.enforces = settings.policy.mode == "enforce"
        self.is_lazy = False  # an async generator does nothing before its first piece
        self.costs = Costs(self.name, settings, self.guard.accounts.pricing, self.guard.clock)
        self.queue = CallQueue(lambda: self.costs.width, settings.policy.hold_seconds)
        self.problems: set[str] = set()  # with answers, already logged
        self.context: RunContext | None = None  # for the limits of a run: that run, also in a run inside it
        # nothing has to be awaited to open a call: neither a breaker nor a store
        self.opens_at_once = not settings.breaker and not self.guard.shares_store
        self._reads_request = settings.in_usd or settings.in_tokens or settings.context
        self._logged_queueing = False
        self._lock = threading.Lock()
        self._own: RunState | None = None
        self._forks = _forks.count

    # ---- runs -------------------------------------------------------------------------------------------------------

    def state(self) -> RunState:
        """The current run: that of ``with runguard.run(...)``, or the one that began with this callable."""
        context = self.context or SURROUNDINGS.get().run
        while context is not None and context.ended:
            context = context.outer
        if context is None:
            own = self._own
            if own is None or self._forks != _forks.count:  # after a fork, the child's calls are a run of their own
                with self._lock:
                    own = self._own if self._forks == _forks.count else None
                    if own is None:
                        own = self._own = self._begin(RunContext())
                    self._forks = _forks.count
            return own
        known = context.states.get(self)
        if known is None:
            with self._lock:
                known = context.states.get(self) or self._begin(context)
                context.states[self] = known
            context.bill(self.guard, known.run)
        return known

    def _begin(self, context: RunContext) -> RunState:
        app, now = context.app or self.name, self.guard.clock()
        info = RunInfo(context.id, app, context.user, context.session, "", now, labels=context.labels)
        state, policy = RunState(self.guard.start(info)), self.settings.policy
        if self.settings.loop and self.settings.by == "result":
            assert policy.cycle_repeats is not None
            state.progress = NoProgress(policy.cycle_repeats, policy.max_cycle_len or 1)
        return state

    def reset(self) -> None:
        """Begin a new run, with new limits and an empty memory.

        Inside ``with runguard.run(...)``, for this callable in that block.
        """
        context = self.context or SURROUNDINGS.get().run
        with self._lock:
            if context is not None and not context.ended:
                old = context.states.pop(self, None)
            else:
                old, self._own = self._own, None
        if old is not None:
            self.guard.end(old.run.info.run)

    def extend(
        self, scope: str | None = None, *, usd: Any = None, tokens: Any = None, calls: Any = None
    ) -> list[BudgetStatus]:
        """Raise or lower the caps of a scope, or of the current run. Runs that these caps stopped may go on."""
        moved = self.guard.accounts.extend(scope or scopes_of(self.state().run.info)[0], usd, tokens, calls)
        scopes = {status.scope for status in moved}
        for run in list(self.guard.runs.values()):
            trip = run.stopped
            if trip is not None and trip.rule == "budget" and trip.scope_id in scopes:
                run.lift()
        return moved

    def flush(self, seconds: float = 2.0) -> bool:
        """Wait, at most this long, until everything handed over has left and dropped streams are booked."""
        return FINALIZED.flush(seconds) and super().flush(seconds)

    # ---- a request --------------------------------------------------------------------------------------------------

    def request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        """What the arguments say about the call, and about the tools that the last answer asked for."""
        if self.settings.loop and self.settings.by == "result":
            try:
                self._check_progress(args, kwargs)
            except Exception as error:
                self.fault(error)
        try:
            if not (self._reads_request and (args or kwargs)):
                return NO_REQUEST
            return read_request(args, kwargs, self.state().prompts.measure)
        except Exception as error:
            self.fault(error)
            return NO_REQUEST

    def _check_progress(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = self.state()
        run, progress = state.run, state.progress
        if progress is None or run.stopped is not None:
            return
        results = newest_results(args, kwargs) if progress.waits_for_results else []
        mark = None if results else request_mark(args, kwargs)
        with state.lock:
            finding = progress.next_request(run.info.run, self.name, self.guard.clock(), results, mark)
            if finding is not None:
                self.stop_run(state, finding)

    def counted(self, request: Request, tokens: Any) -> Request:
        """The request with the user's own token count.

        A count of 0 for a prompt that has text is ignored, because it would reserve nothing.
        """
        if type(tokens) is int and (tokens > 0 or (tokens == 0 and not request.input_tokens)):
            return replace(request, input_tokens=tokens)
        what = f"raised {type(tokens).__name__}" if isinstance(tokens, Exception) else f"gave {shown(tokens)}"
        _log.warning("runguard.tokens_failed: tokens %s for '%s'; using an estimate of the prompt", what, self.name)
        return request

    # ---- the queue of calls whose cost is unknown -------------------------------------------------------------------

    def admission(self, request: Request, no_loop: bool, owners: tuple[Charge, ...]) -> tuple[Admission, Ticket | None]:
        """Whether a call may start now, or has to wait because nothing limits what it may cost.

        ``owners``: the charges around it.
        """
        try:
            if not self.enforces or None not in self.costs.bound(request):
                return Admission.NOW, None
            # A call made inside a call of the same callable, or of any that others wait for: waiting might never end.
            if any(charge.home is self.guard.accounts for charge in owners):
                return Admission.ALONGSIDE, None
            around = frozenset(id(charge) for charge in owners if id(charge) in WAITED_FOR)
            admission, ticket = self.queue.ask(around, no_loop)
            if admission is Admission.QUEUED and not self._logged_queueing:
                self._logged_queueing = True
                _log.info(
                    "runguard.unknown_cost: the cost of a call of '%s' is known only afterwards, so the first calls "
                    "run one at a time; set cost=, or a price and an output limit, to run them at once",
                    self.name,
                )
            return admission, ticket
        except Exception as error:
            self.fault(error)
            return Admission.NOW, None

    def give_back(self, ticket: Ticket | None) -> None:
        """The call has ended, or was not made: the next in the queue may start."""
        if ticket is None:
            return
        WAITED_FOR.pop(id(ticket.charge), None)
        self.queue.give_back(ticket)

    # ---- stops and faults -------------------------------------------------------------------------------------------

    def stop_run(self, state: RunState, finding: Finding) -> Trip | None:
        run = state.run
        if run.stopped is not None:
            return run.stopped
        return self.guard.stop(run, ModelCall(run.info.run, ROOT_LANE, self.name, self.guard.clock()), finding)

    def fault(self, error: Exception, run: Run | None = None) -> None:
        """Count an internal error before a call. Raises where the policy says that it stops the run."""
        trip = self.guard.give_up("functions", error, run.info.run if run is not None else "", self.name)
        if trip is not None:
            raise RunStoppedError.of(trip)

    def give_up_call(self, error: Exception) -> None:
        """Count an internal error that leaves a call without a run. Raises where the call would get past a budget."""
        trip = self.guard.give_up_call("functions", error, "", self.name)
        if trip is not None:
            raise RunStoppedError.of(trip)


@dataclass(slots=True)
class GuardedCall:
    """One call from its reservation to its bill."""

    caller: Caller
    state: RunState
    charge: Charge | None
    request: Request
    ticket: Ticket | None = None  # its cost is not known beforehand: others wait for it
    alongside: bool = False  # its cost is not known beforehand, and it cannot wait for the others
    permit: Permit | None = None
    stacked: bool = False  # the callable is itself guarded: when that guard refuses, no call was made
    over: bool = False


# Calls with tickets, by the identity of their charge. A call inside one of them must not wait for another.
WAITED_FOR: Final[dict[int, Charge]] = {}


def open_ones(charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """The charges around a call without those of finished calls: a task that began inside one may outlive it."""
    return tuple([charge for charge in charges if not charge.over]) if charges else charges


# ---- Coroutines for callers without an event loop.

_T = TypeVar("_T")
_IDLE_HELPERS: Final = 8


class _Helper:
    """A thread with an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = start_thread("runguard-waiting", self._work)

    def _work(self) -> None:
        self.loop.run_forever()  # which a SystemExit in a job ends: then it is run again
        self.loop.close()

    def retire(self) -> None:
        """End the thread once it has nothing to do."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)


class _Helpers:
    """Runs coroutines for callers that have to wait and have no event loop to do it on.

    A helper works for one caller at a time. So user code in a coroutine, such as a termination condition or a cap
    function, keeps no other caller waiting, and may itself make guarded calls.
    """

    def __init__(self) -> None:
        self._idle: deque[_Helper] = deque()

    def finish(self, make: Callable[[], Coroutine[Any, Any, _T]], lost: Callable[[_T], None]) -> _T:
        helper = self._take()
        future = asyncio.run_coroutine_threadsafe(make(), helper.loop)
        try:
            result = future.result()
        except BaseException:
            is_done = future.done()
            if not future.cancel() and not future.cancelled() and future.exception() is None:
                lost(future.result())  # interrupted in the moment in which it came
            self._give_back(helper, is_done=is_done)
            raise
        self._give_back(helper, is_done=True)
        return result

    def _take(self) -> _Helper:
        while True:
            try:
                helper = self._idle.pop()
            except IndexError:
                return _Helper()
            if helper.thread.is_alive():  # a fork takes no threads along
                return helper

    def _give_back(self, helper: _Helper, *, is_done: bool) -> None:
        if is_done and len(self._idle) < _IDLE_HELPERS:
            self._idle.append(helper)
        else:
            helper.retire()


_helpers: Final = _Helpers()


def drive(make: Callable[[], Coroutine[Any, Any, _T]], is_shared: bool, lost: Callable[[_T], None]) -> _T:
    """Run a coroutine for a caller without an event loop: here while it need not wait, else on a helper's loop.

    ``make`` makes the coroutine when it can be run at once, because one that is never run would be warned about.
    ``is_shared``: it certainly waits. ``lost`` gets a result that came when its caller had been interrupted.
    """
    if is_shared:
        return _helpers.finish(make, lost)
    job = make()
    try:
        job.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    return _helpers.finish(lambda: job, lost)
