"""Remote A2A agents: reservations before their calls, budgets that travel along, and stops on the far side.

The hooks of ``plugin`` call ``RemoteCalls``. ``events`` calls ``remote_budget`` to read what a caller can pay for.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.adk.agents import BaseAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event

from runguard.adk.runs import Invocation, Invocations, lane_of
from runguard.adk.stops import announce, mark_stop
from runguard.core.decision import METADATA_KEY, Action, Decision, Finding, Trip, printable
from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall, ModelResult
from runguard.core.identity import Newest
from runguard.core.money import UNLIMITED, to_count, to_nano, to_usd
from runguard.engine.charges import Ceiling, lower_ceiling
from runguard.engine.guard import Guard
from runguard.policy.settings import Policy, RemoteAgent, reserved_for
from runguard.pricing.rates import Rates, Unpriced, Usage
from runguard.providers.a2a import RESPONSE_KEY, UNREPORTED, ReplyReader, total_of

_log: Final = logging.getLogger("runguard")
_NO_USAGE: Final = Unpriced(UNREPORTED, "the remote agent did not report its usage")
_AGENTS_KEPT: Final = 1_000
_Key = tuple[str, str, str | None]  # invocation, agent and branch


@dataclass(slots=True)
class _RemoteCall:
    """One call of a remote agent. It is one call on the account, whatever it does over there.

    It keeps its reservation while it works. What its reply reports is added up and booked when it ends, however it
    ends.
    """

    invocation: Invocation
    event: ModelCall
    key: _Key
    usage: Usage
    nano: int = 0
    reports: int = 0
    lacks_usage: bool = False  # a reply, or its end, reported nothing


class RemoteCalls:
    """The calls of remote agents of one guard's runs."""

    def __init__(self, guard: Guard, invocations: Invocations) -> None:
        self._guard, self._invocations = guard, invocations
        self._reader = ReplyReader()
        self._open: dict[_Key, _RemoteCall] = {}
        self._reported: set[str] = set()  # agents whose missing usage is in the log

    async def before(self, agent: BaseAgent, invocation: Invocation, lane: str, ic: InvocationContext) -> Trip | None:
        """Reserve for a call of a remote agent. A trip: it may not be made."""
        guard, rule = self._guard, self._guard.policy.remote_agent(agent.name)
        event = ModelCall(
            invocation.run.info.run, lane, agent.name, guard.clock(), rule.model, bound=reserved_for(rule)
        )
        decision = guard.check(event)
        if _stops(decision):
            return decision.trip
        decision = await guard.reserve(event, slot=False)
        if _stops(decision) or event.charge is None:
            return decision.trip
        call = _RemoteCall(invocation, event, (invocation.id, agent.name, ic.branch), Usage())
        self._open[call.key] = call
        invocation.at_end[call.key] = lambda: self._close(call)
        if rule.send_budget and guard.policy.mode == "enforce":
            prepare(agent, call.key, _held(event.charge, rule))
        return None

    def on_event(self, invocation: Invocation, event: Event) -> None:
        """Read an event that may be part of a reply."""
        response = (event.custom_metadata or {}).get(RESPONSE_KEY)
        call = self._open.get((invocation.id, event.author, event.branch))
        if response is None:
            if call is not None and event.error_message:
                call.lacks_usage = True  # the far side is gone, or never was there
            return
        reply = self._reader.read(response)
        if call is not None:
            for usage in reply.reports:
                self._add(call, usage)
            call.lacks_usage = call.lacks_usage or (reply.is_over and not call.reports)
        if reply.trip is not None:
            lane = lane_of(self._guard, invocation, event.branch, event.isolation_scope)
            if invocation.stop_in(lane) is None:
                self._stop(invocation, event, lane, reply.trip)

    def after(self, agent: BaseAgent, ic: InvocationContext) -> None:
        """The agent has finished."""
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

    def _close(self, call: _RemoteCall) -> None:
        if self._open.pop(call.key, None) is None:
            return
        call.invocation.at_end.pop(call.key, None)
        forget(call.key)
        guard, event = self._guard, call.event
        charge, lane = event.charge, event.lane
        if not call.reports:
            charge.model, charge.rates = UNREPORTED, _NO_USAGE
            guard.settle(charge, Usage())
        else:
            priced = isinstance(charge.rates, Rates)
            guard.settle(charge, call.usage, nano=call.nano if priced else None, estimated=_is_estimate(charge.rates))
            if call.lacks_usage:
                rest = ModelCall(event.run, lane, event.agent, guard.clock(), UNREPORTED)
                missing = guard.accounts.open_settled(call.invocation.run.run_costs, rest)
                missing.rates = _NO_USAGE
                guard.settle(missing, Usage())
        if call.lacks_usage or not call.reports:
            self._log_unreported(event.agent)

    def _stop(self, invocation: Invocation, event: Event, lane: str, far: Any) -> None:
        """A guard on the far side has stopped the run there. This run stops, too."""
        guard, agent = self._guard, event.author
        rule, name = (printable(str(far.get(key, "an unknown rule")))[:64] for key in ("rule", "id"))
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


_remote_types: Final[dict[type, bool]] = {}


def is_remote(agent: BaseAgent) -> bool:
    """Whether an agent works on another server. ADK's class is not imported: it needs the A2A packages."""
    kind = type(agent)
    known = _remote_types.get(kind)
    if known is None:
        known = any(one.__name__ == "RemoteA2aAgent" for one in kind.__mro__)
        if len(_remote_types) < _AGENTS_KEPT:
            _remote_types[kind] = known
    return known


def _held(charge: Any, rule: RemoteAgent) -> Ceiling:
    """What was reserved, in the units that a budget limits; else what the rule says."""
    usd = None if rule.max_usd is None else to_nano(rule.max_usd)
    tokens = rule.max_tokens
    if charge.hold is not None:
        accounts, (held_usd, held_tokens, _) = charge.lines.accounts, charge.hold.amount
        usd = held_usd if any(one.cap_usd < UNLIMITED for one in accounts) else usd
        tokens = held_tokens if any(one.cap_tokens < UNLIMITED for one in accounts) else tokens
    return usd, tokens


def _is_estimate(rates: Rates | Unpriced) -> bool:
    return isinstance(rates, Rates) and rates.estimated


def _stops(decision: Decision) -> bool:
    return decision.action >= Action.BLOCK and decision.enforced


# ---- The budget in the metadata of a request: ``{"runguard": {"v": 1, "max_usd": "0.25", "max_tokens": 9000}}``

_VERSION: Final = 1
_NO_CEILING: Final[Ceiling] = (None, None)
_SENDING_KEPT: Final = 10_000
_sending: Final = Newest[_Key, Ceiling](_SENDING_KEPT)


def remote_budget(policy: Policy, config: Any) -> tuple[Ceiling, str]:
    """What the caller of an A2A server can pay for; and an error text when that cannot be read.

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
    """The next request of a remote agent carries ``amount``. Several guards: the lower one counts."""
    _sending[key] = lower_ceiling(_sending.get(key, _NO_CEILING), amount)
    try:
        _connect(agent)
    except Exception:
        _log.exception(
            "runguard.remote_budget_not_sent: this version of ADK does not let RunGuard add the budget to requests of "
            "remote agent %s; its server uses its own limits",
            agent.name,
        )


def forget(key: _Key) -> None:
    """The call of the remote agent is over."""
    _sending.pop(key, None)


class BudgetSender:
    """Adds the budget to the metadata of a request, beside what others have put there.

    ADK overwrites the metadata of interceptors by that of a provider. So where the user has given a provider, this is
    put around it, and otherwise this is one more interceptor.
    """

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider

    def __call__(self, context: Any, message: Any) -> Any:
        """As ``a2a_request_meta_provider``."""
        return _with_budget(context, self._provider(context, message))

    async def before_request(self, context: Any, request: Any, parameters: Any) -> tuple[Any, Any]:
        """As an interceptor."""
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
    # a copy: agents may share a config
    agent._config = agent._config.model_copy(update={"request_interceptors": [*interceptors, ours]})
