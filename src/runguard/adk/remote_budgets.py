"""The budget in the metadata of an A2A request: written on the side that calls, read on the side that is called.

``{"runguard": {"v": 1, "max_usd": "0.25", "max_tokens": 9000}}``. ADK's server passes the metadata of a request on in
``RunConfig.custom_metadata["a2a_metadata"]``.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from google.adk.agents import BaseAgent

from runguard.core.decision import METADATA_KEY
from runguard.core.errors import PolicyError
from runguard.core.identity import Newest
from runguard.core.money import to_count, to_nano, to_usd
from runguard.engine.charges import Ceiling, lower_ceiling
from runguard.policy.settings import Policy

_log: Final = logging.getLogger("runguard")
_VERSION: Final = 1
_NOTHING: Final[Ceiling] = (None, None)
_KEPT: Final = 10_000
_Key = tuple[str, str, str | None]  # invocation, agent and branch
_sending: Final = Newest[_Key, Ceiling](_KEPT)


def remote_budget(policy: Policy, config: Any) -> tuple[Ceiling, str]:
    """What the caller of an A2A server can pay for; and an error text when that cannot be read."""
    metadata = getattr(config, "custom_metadata", None) if policy.trust_remote_budget else None
    sent = metadata.get("a2a_metadata") if isinstance(metadata, Mapping) else None
    given = sent.get(METADATA_KEY) if isinstance(sent, Mapping) else None
    if given is None:
        return _NOTHING, ""
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
        return _NOTHING, f"the budget in the A2A request cannot be used: {error}"


def prepare(agent: BaseAgent, key: _Key, amount: Ceiling) -> None:
    """The next request of a remote agent carries ``amount``. Several guards: the lower one counts."""
    _sending[key] = lower_ceiling(_sending.get(key, _NOTHING), amount)
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
        usd, tokens = _sending.get((context.invocation_id, context.agent.name, context.branch), _NOTHING)
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
