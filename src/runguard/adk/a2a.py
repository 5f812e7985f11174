"""Remote A2A agents: reservations before their calls, budgets that travel along, and stops on both sides.

The hooks of ``plugin`` call ``RemoteCalls``, and ``watched`` ends the stream of a remote agent whose run is stopped.
``events`` calls ``remote_budget`` to read what a caller can pay for.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

from google.adk.agents import BaseAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event

from runguard.adk.patching import WRAPPED
from runguard.adk.runs import Invocation, Invocations, lane_of
from runguard.adk.stops import announce, mark_stop, may_escalate, stop_content
from runguard.core.decision import METADATA_KEY, STOP_CODE, Action, Decision, Finding, Trip, printable
from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall, ModelResult
from runguard.core.identity import LruDict, words_name
from runguard.core.money import UNLIMITED, to_count, to_nano, to_usd
from runguard.engine.charges import Denied, finding_of
from runguard.engine.guard import Guard
from runguard.engine.spending import Ceiling, lower_ceiling
from runguard.policy.settings import LEAST_HELD, Policy, RemoteAgent, reserved_for
from runguard.pricing.rates import Rates, Unpriced, Usage
from runguard.providers.a2a import ERROR_KEY, RESPONSE_KEY, UNREPORTED, ReplyReader, total_of

_log: Final = logging.getLogger("runguard")
_NO_USAGE: Final = Unpriced(UNREPORTED, "the remote agent did not report its usage")
_AGENTS_KEPT: Final = 1_000
_TICK_S: Final = 0.01  # the clocks of the guard and of the event loop may differ
_CLOSING_S: Final = 1.0
_Key = tuple[str, str, str | None]  # invocation, agent and branch


@dataclass(slots=True, eq=False)
class _RemoteCall:
    """One call of a remote agent. It is one call on the account, whatever it does over there.

    What its reply reports is added up, and the sum is booked at once. A call with a reservation keeps it until the sum
    has used it up: the far side may have been told that it can spend so much.
    """

    calls: "RemoteCalls"
    invocation: Invocation
    event: ModelCall
    key: _Key
    usage: Usage = field(default_factory=Usage)
    nano: int = 0
    reports: int = 0
    booked: int = 0  # reports that are on the accounts
    lacks_usage: bool = False  # a reply, or its end, reported nothing
    denied: Denied | None = None  # a budget cannot pay for what was reported
    is_over: bool = False  # the reply has ended
    said: str = ""  # its last text


class RemoteCalls:
    """The calls of remote agents of one guard's runs."""

    def __init__(self, guard: Guard, invocations: Invocations) -> None:
        self._guard, self._invocations = guard, invocations
        self._reader = ReplyReader()
        self._open: dict[_Key, _RemoteCall] = {}
        self._reported: set[str] = set()  # agents whose missing usage is in the log

    async def before(self, agent: BaseAgent, invocation: Invocation, lane: str, ic: InvocationContext) -> Trip | None:
        """Reserve for a call of a remote agent. Return the trip if it may not be made."""
        guard, rule = self._guard, self._guard.policy.remote_agent(agent.name)
        event = ModelCall(
            invocation.run.info.run, lane, agent.name, guard.clock(), rule.model, bound=reserved_for(rule)
        )
        asked = ic.user_content.parts if ic.user_content is not None else None
        event.asked = words_name("\0".join(part.text or "" for part in asked or ()))
        decision = guard.check(event)
        if _stops(decision):
            return decision.trip
        decision = await guard.reserve(event, slot=False)
        if _stops(decision) or event.charge is None:
            return decision.trip
        call = _RemoteCall(self, invocation, event, (invocation.id, agent.name, ic.branch))
        if (earlier := self._open.get(call.key)) is not None:  # ADK did not report its end
            self._close(earlier)
        self._open[call.key] = call
        invocation.at_end[call.key] = lambda: self._close(call)
        _watch(call)
        if rule.send_budget and guard.policy.mode == "enforce":
            prepare(agent, call.key, _held(event.charge, rule))
        return None

    def on_event(self, invocation: Invocation, event: Event) -> None:
        """Read an event that may be part of a reply."""
        response = (event.custom_metadata or {}).get(RESPONSE_KEY)
        call = self._open.get((invocation.id, event.author, event.branch))
        if call is not None and event.content is not None and not event.error_message:
            parts = event.content.parts or ()
            said = "".join(part.text or "" for part in parts if not part.thought)
            # Files and data are not compared: each counts as new.
            call.said = said or (event.id if any(part.text is None for part in parts) else call.said)
        if response is None:
            if call is not None and event.error_message:
                call.lacks_usage = True  # the far side is gone, never was there, or its reply was cut off
            return
        reply = self._reader.read(response)
        if call is not None:
            for usage in reply.reports:
                self._add(call, usage)
            call.is_over = call.is_over or reply.is_over
            call.lacks_usage = call.lacks_usage or (reply.is_over and not call.reports)
            if reply.reports:
                self._book(call)
        if reply.trip is not None:
            lane = lane_of(self._guard, invocation, event.branch, event.isolation_scope)
            if invocation.stop_in(lane) is None:
                self._stop(invocation, event, lane, reply.trip)

    def stop_of(self, call: _RemoteCall, *, is_late: bool = False) -> Trip | None:
        """Return why a call at work has to end: a stop in force, a budget, or the time.

        ``is_late``: its time is over by the clock of the event loop.
        """
        try:
            return self._stop_of(call, is_late)
        except Exception as error:
            return self._guard.fault("remote agent", error, call.invocation.run.info.run, call.event.agent)

    def _stop_of(self, call: _RemoteCall, is_late: bool) -> Trip | None:
        guard, run, lane = self._guard, call.invocation.run, call.event.lane
        trip = self._invocations.stop_of(call.invocation.id) or call.invocation.stop_in(lane)
        if trip is not None:
            return trip
        now = ModelCall(run.info.run, lane, call.event.agent, guard.clock(), call.event.model)
        if is_late and run.deadline is not None:
            now.at = max(now.at, run.deadline.started + run.deadline.seconds + _TICK_S)
        finding = run.deadline.observe(now) if run.deadline is not None else None
        if finding is None and call.denied is not None:
            finding = finding_of(call.denied, now, guard.store_name)
        decision = guard.found(now, finding) if finding is not None else None
        return decision.trip if decision is not None and _stops(decision) else None

    def seconds_left(self, call: _RemoteCall) -> float:
        """Return how long a call may be silent. A reply that has ended may take a moment to close."""
        if self._guard.policy.mode != "enforce":
            return math.inf
        left = self._guard.faults.attempt("remote agent", self._guard.waits.left_of, call.invocation.run)
        return math.inf if left is None else max(left + _TICK_S, _CLOSING_S if call.is_over else 0.0)

    def stop_event(self, agent: BaseAgent, ic: InvocationContext, call: _RemoteCall, trip: Trip) -> Event | None:
        """Return the last event of a call that is ended here. None after a fault: the stream of the run reports it."""
        last: Event | None = self._guard.faults.attempt("stopping", self._stop_event, agent, ic, call, trip)
        return last

    def _stop_event(self, agent: BaseAgent, ic: InvocationContext, call: _RemoteCall, trip: Trip) -> Event:
        text = self._guard.stop_text(trip)
        event = Event(author=agent.name, invocation_id=ic.invocation_id, branch=ic.branch, content=stop_content(text))
        event.custom_metadata = {ERROR_KEY: text}  # as ADK marks a remote call that fails: replay finds it by that
        mark_stop(event, trip, text)
        announce(trip, self._invocations)
        own = call.invocation.run.lanes.get(call.event.lane)
        if own is not None:
            own.was_stopped = True
        if may_escalate(agent):
            event.actions.escalate = True
        return event

    def after(self, agent: BaseAgent, ic: InvocationContext) -> None:
        """Close the call of an agent that has finished."""
        call = self._open.get((ic.invocation_id, agent.name, ic.branch))
        if call is not None:
            self._close(call)

    def _add(self, call: _RemoteCall, usage: Usage) -> None:
        call.reports += 1
        call.lacks_usage = call.lacks_usage or not usage.input
        call.usage = total_of((call.usage, usage))
        rates = call.event.charge.rates
        if isinstance(rates, Rates):  # each model call at its own price: long prompts may cost more
            call.nano += rates.cost(usage)

    def _book(self, call: _RemoteCall) -> None:
        """Book the sum so far, unless the reservation of the call still covers it."""
        charge, accounts = call.event.charge, self._guard.accounts
        taken = (call.nano, call.usage.input + call.usage.output, 1)
        call.denied = accounts.beyond(charge, taken) or call.denied
        if call.denied is None and charge.hold is not None and charge.hold.is_open:
            pairs = zip(charge.hold.amount[:2], taken, strict=False)
            if any(held > max(took, LEAST_HELD) for held, took in pairs):
                return
        self._settle(call)

    def _settle(self, call: _RemoteCall) -> None:
        if call.booked == call.reports:
            return
        call.booked, charge = call.reports, call.event.charge
        rates = charge.rates if isinstance(charge.rates, Rates) else None
        nano, estimated = (call.nano, rates.estimated) if rates is not None else (None, False)
        self._guard.settle(charge, call.usage, nano=nano, estimated=estimated)

    def _close(self, call: _RemoteCall) -> None:
        if self._open.pop(call.key, None) is None:
            return
        call.invocation.at_end.pop(call.key, None)
        _sending.pop(call.key, None)
        _unwatch(call)
        guard, event = self._guard, call.event
        charge, lane = event.charge, event.lane
        if not call.reports:
            charge.model, charge.rates = UNREPORTED, _NO_USAGE
            guard.settle(charge, Usage())
        else:
            self._settle(call)
            if call.lacks_usage:
                rest = ModelCall(event.run, lane, event.agent, guard.clock(), UNREPORTED)
                missing = guard.accounts.open_settled(call.invocation.run.run_costs, rest)
                missing.rates = _NO_USAGE
                guard.settle(missing, Usage())
        # The rules see it as the words of a local agent. ADK sends nothing where nobody has said anything since, so
        # such calls never have words.
        words = ModelResult(event.run, lane, event.agent, guard.clock())
        words.text_id, words.text = words_name(call.said), call.said
        guard.after(words)
        if call.lacks_usage or not call.reports:
            self._log_unreported(event.agent)

    def _stop(self, invocation: Invocation, event: Event, lane: str, far: Any) -> None:
        """Stop this run, because a guard on the far side has stopped the run there."""
        guard, agent = self._guard, event.author
        rule, name = (_short(far.get(key, "an unknown rule")) for key in ("rule", "id"))
        detail = f"remote agent {agent} was stopped by {rule}" + (f", trip {name}" if far else "")
        finding = Finding("remote_stop", Action.STOP, 1, 1, "stops of a remote agent", "run", "", agent, detail)
        decision = guard.found(ModelResult(invocation.run.info.run, lane, agent, guard.clock()), finding)
        if _stops(decision) and decision.trip is not None:
            mark_stop(event, decision.trip, guard.stop_text(decision.trip))
            announce(decision.trip, self._invocations)

    def _log_unreported(self, agent: str) -> None:
        if agent in self._reported or len(self._reported) >= _AGENTS_KEPT:
            return
        self._reported.add(agent)
        _log.warning(
            "runguard.remote_unreported: remote agent %s did not report what it used; budgets do not contain it", agent
        )


_REMOTE: Final = "RemoteA2aAgent"
_remote_types: Final[dict[type, bool]] = {}


def is_remote(agent: BaseAgent) -> bool:
    """Return whether an agent works on another server. ADK's class is not imported: it needs the A2A packages."""
    kind = type(agent)
    known = _remote_types.get(kind)
    if known is None:
        known = any(one.__name__ == _REMOTE for one in kind.__mro__)
        if len(_remote_types) < _AGENTS_KEPT:
            _remote_types[kind] = known
    return known


# ---- The end of a stream after a stop. ADK has no hook that ends a remote agent, so its method is wrapped.

_METHOD: Final = "_run_async_impl"
_at_work: Final[dict[_Key, "_Work"]] = {}


class _Work:
    """A remote agent at work, for one guard or several. The kill switch ends it while it is silent, too."""

    __slots__ = ("_late", "_loop", "_timeout", "calls")

    def __init__(self) -> None:
        self.calls: list[_RemoteCall] = []
        self._loop = asyncio.get_running_loop()
        self._timeout: asyncio.Timeout | None = None  # of the wait for the next event
        self._late: _RemoteCall | None = None  # the call whose time is over first

    def end(self) -> None:
        """End the wait for the next event. Safe to call from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._late = None
            self._timeout.reschedule(self._loop.time())

    async def following(self, events: AsyncGenerator[Event, None]) -> Event | None:
        """Wait for the next event. Return None if the time is over or the kill switch was used.

        Raise ``StopAsyncIteration`` at the end of the reply.
        """
        left = {call: call.calls.seconds_left(call) for call in self.calls}
        self._late = min(left, key=left.__getitem__, default=None)
        seconds = left[self._late] if self._late is not None else math.inf
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds) as self._timeout:
                event = await anext(events)
                self._late = None
                return event
        except TimeoutError:
            if self._timeout is None or not self._timeout.expired():
                raise
            return None
        finally:
            self._timeout = None

    def stop(self) -> tuple[_RemoteCall, Trip] | None:
        for call in self.calls:
            trip = call.calls.stop_of(call, is_late=call is self._late)
            if trip is not None:
                return call, trip
        return None


def wrap_remote_agents() -> None:
    """Wrap the classes of remote agents that exist by now.

    To be called before each run, because ADK reads the method before its first hook.
    """
    kinds: list[type] = [kind for kind in BaseAgent.__subclasses__() if kind.__name__ == _REMOTE]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if _METHOD in kind.__dict__:
            WRAPPED.wrap(kind, _METHOD, watched)


def _watch(call: _RemoteCall) -> None:
    """End the stream of this call after a stop."""
    work = _at_work.setdefault(call.key, _Work())
    work.calls.append(call)
    call.invocation.run.in_flight.add(work.end)


def _unwatch(call: _RemoteCall) -> None:
    work = _at_work.get(call.key)
    if work is not None and call in work.calls:
        call.invocation.run.in_flight.discard(work.end)
        work.calls.remove(call)
        if not work.calls:
            del _at_work[call.key]


def watched(original: Any) -> Any:
    """Wrap the method of a remote agent. It closes the connection after a stop, and passes on everything before."""

    @wraps(original)
    async def run_async_impl(self: Any, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        work = _at_work.get((ctx.invocation_id, self.name, ctx.branch))
        async with aclosing(original(self, ctx)) as events:
            if work is None:
                async for event in events:
                    yield event
                return
            stop = None
            while stop is None:
                was_over = any(call.is_over for call in work.calls)
                try:
                    following = await work.following(events)
                except StopAsyncIteration:
                    return
                if following is None:
                    stop = work.stop()
                    break
                yield following
                if following.error_code == STOP_CODE and work.stop() is not None:
                    return  # it carries the stop
                if was_over or not any(call.is_over for call in work.calls):  # a finished reply is not stopped
                    stop = work.stop()
        if stop is not None:
            call, trip = stop
            last = call.calls.stop_event(self, ctx, call, trip)
            if last is not None:
                yield last

    return run_async_impl


def _held(charge: Any, rule: RemoteAgent) -> Ceiling:
    """Return what was reserved, in the units that a budget limits, and else what the rule says."""
    usd = None if rule.max_usd is None else to_nano(rule.max_usd)
    tokens = rule.max_tokens
    if charge.hold is not None:
        accounts, (held_usd, held_tokens, _) = charge.lines.accounts, charge.hold.amount
        usd = held_usd if any(one.cap_usd < UNLIMITED for one in accounts) else usd
        tokens = held_tokens if any(one.cap_tokens < UNLIMITED for one in accounts) else tokens
    return usd, tokens


def _short(name: Any) -> str:
    """Return a name from the far side in a form that is safe in a message."""
    return printable(name[:64]) if isinstance(name, str) else "an unknown name"


def _stops(decision: Decision) -> bool:
    return decision.action >= Action.BLOCK and decision.enforced


# ---- The budget in the metadata of a request: ``{"runguard": {"v": 1, "max_usd": "0.25", "max_tokens": 9000}}``

_VERSION: Final = 1
_NO_CEILING: Final[Ceiling] = (None, None)
_SENDING_KEPT: Final = 10_000
_sending: Final = LruDict[_Key, Ceiling](_SENDING_KEPT)


def remote_budget(policy: Policy, config: Any) -> tuple[Ceiling, str]:
    """Return what the caller of an A2A server can pay for, and an error text when that cannot be read.

    ADK's server passes the metadata of a request on in ``RunConfig.custom_metadata["a2a_metadata"]``.
    """
    metadata = getattr(config, "custom_metadata", None) if policy.trust_remote_budget else None
    sent = metadata.get("a2a_metadata") if isinstance(metadata, Mapping) else None
    given = sent.get(METADATA_KEY) if isinstance(sent, Mapping) else None
    if given is None:
        return _NO_CEILING, ""
    try:
        if not isinstance(given, Mapping) or given.get("v") != _VERSION:
            raise PolicyError("unknown format")
        usd, tokens = given.get("max_usd"), given.get("max_tokens")
        if isinstance(tokens, float) and tokens.is_integer():  # the wire may have no integers
            tokens = int(tokens)
        return (
            None if usd is None else to_nano(usd, "max_usd"),
            None if tokens is None else to_count(tokens, "max_tokens"),
        ), ""
    except PolicyError as error:
        return _NO_CEILING, f"the budget in the A2A request cannot be used: {error}"


def prepare(agent: BaseAgent, key: _Key, amount: Ceiling) -> None:
    """Let the next request of a remote agent carry ``amount``. With several guards, the lowest amount counts."""
    _sending[key] = lower_ceiling(_sending.get(key, _NO_CEILING), amount)
    try:
        _connect(agent)
    except Exception:
        _log.exception(
            "runguard.remote_budget_not_sent: this version of ADK does not let RunGuard add the budget to requests of "
            "remote agent %s; its server uses its own limits",
            agent.name,
        )


class BudgetSender:
    """Adds the budget to the metadata of a request, beside what others have put there.

    ADK overwrites the metadata of interceptors by that of a provider. So where the user has given a provider, this is
    put around it, and otherwise this is one more interceptor.
    """

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider

    def __call__(self, context: Any, message: Any) -> Any:
        """Add the budget as ADK's ``a2a_request_meta_provider``."""
        return _with_budget(context, self._provider(context, message))

    async def before_request(self, context: Any, request: Any, parameters: Any) -> tuple[Any, Any]:
        """Add the budget as an interceptor of ADK."""
        parameters.request_metadata = _with_budget(context, parameters.request_metadata)
        return request, parameters


def _with_budget(context: Any, metadata: Any) -> Any:
    try:
        usd, tokens = _sending.get((context.invocation_id, context.agent.name, context.branch), _NO_CEILING)
        if usd is None and tokens is None:
            return metadata
        amounts = {"max_usd": None if usd is None else str(to_usd(usd)), "max_tokens": tokens}
        budget = {"v": _VERSION, **{name: amount for name, amount in amounts.items() if amount is not None}}
        return {**(metadata or {}), METADATA_KEY: budget}
    except Exception:
        _log.exception("runguard.remote_budget_not_sent: the budget could not be added to a request")
        return metadata


def _connect(agent: Any) -> None:
    provider = agent._a2a_request_meta_provider
    if isinstance(provider, BudgetSender):
        return
    if provider is not None:
        agent._a2a_request_meta_provider = BudgetSender(provider)
        return
    from google.adk.a2a.agent.config import RequestInterceptor

    interceptors = agent._config.request_interceptors or []
    if any(isinstance(getattr(one.before_request, "__self__", None), BudgetSender) for one in interceptors):
        return
    ours = RequestInterceptor(before_request=BudgetSender().before_request)
    # Changed in a copy, because agents may share a config.
    agent._config = agent._config.model_copy(update={"request_interceptors": [*interceptors, ours]})
