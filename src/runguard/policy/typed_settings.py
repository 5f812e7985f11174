"""The keywords of ``RunGuardPlugin``, ``install``, ``GuardedLlm``, ``guard`` and ``guard_async``, for editors and type
checkers.

``Policy`` checks the values; a test keeps names and descriptions equal to it.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypedDict

from runguard.core.money import Budget
from runguard.policy.remote_agent_rules import RemoteAgent
from runguard.policy.tool_rules import ToolRule
from runguard.pricing.book import ModelLimits, Price

Dollars = int | float | str | Decimal
PriceOf = Price | Mapping[str, Any]
Alerts = str | Callable[..., Any] | Mapping[str, Any] | Sequence[str | Callable[..., Any] | Mapping[str, Any]]


class CommonSettings(TypedDict, total=False):
    """Settings of every guard. None of them is required."""

    mode: Literal["enforce", "shadow", "off"]
    """enforce acts, shadow only records what it would have done, off does nothing."""
    on_stop: Literal["stop", "raise"]
    """stop ends the run with a final event; raise does that and then raises RunStoppedError to the caller."""
    on_guard_error: Literal["allow", "block"]
    """What a failure inside the guard means for the run. Faults of the store follow on_outage."""
    journal: bool
    """With a durable store, keep each run's journal in it: names, numbers and digests, for replay and the dashboard."""
    telemetry: bool
    """Report to OpenTelemetry, where its API is installed."""
    alerts: Alerts
    """Where to send stops, thresholds and outages: Slack, PagerDuty, webhooks, the log, functions."""
    stop_text: str | None
    """What the end user reads after a stop, instead of the built-in sentence."""
    max_model_calls: int | None
    """Model calls of the run tree. None: the framework's own limit (ADK: 500), held for the tree."""
    max_seconds: float | None
    """Wall clock of the run."""
    max_usd: Dollars | None
    """Dollars of the run tree."""
    max_tokens: int | None
    """Tokens of the run tree, input and output."""
    budgets: Sequence[Budget | Mapping[str, Any]]
    """Limits per session, user, app, agent, model, tool or label, with windows."""
    prices: Mapping[str, PriceOf | Sequence[PriceOf]]
    """USD per million tokens, by model id or glob: adds to and overrides the price list."""
    models: Mapping[str, ModelLimits | Mapping[str, Any]]
    """Context window and output limit, by model id or glob, where they are not known or differ."""
    on_unpriced: Literal["refuse", "tokens"] | PriceOf
    """A dollar limit and a model without a price: refuse the call, count tokens only, or take this price."""
    prices_source: Literal["table", "genai-prices"]
    """The price list: the table of this release, or the installed genai-prices package."""
    min_output_tokens: int
    """When the rest of a budget cannot pay for a full answer, the answer is capped, down to this."""
    store: str
    """Where accounts are kept: memory, sqlite:///path, redis://..., postgresql://... ."""
    store_timeout: float
    """Seconds that one call of the store may take."""
    on_outage: Literal["closed", "open"]
    """The store is away or damaged: closed makes no paid call without an account, open goes on and books later."""
    hold_seconds: float
    """After this time the reservation of a worker that never came back is charged."""
    retention_days: float
    """How long a store keeps records, ended runs and past periods."""
    max_wait_seconds: float
    """How long a call may wait: for other calls' reservations, a budget that waits, or the provider."""
    on_rate_limit: Literal["wait", "pass"] | None
    """After a 429 or 503 with Retry-After, calls to that model wait or pass. None: as budgets do."""
    max_identical_tool_results: int | None
    """Stop at this many equal failures of a tool, or equal answers to the same call."""
    max_handoff_repeats: int | None
    """Stop at this many equal hand-offs without news."""
    max_event_cost_ratio: float | None
    """Stop when an agent's prompts have grown to this many times its first ones in the session."""
    cost_baseline_events: int
    """How many first and last model calls the growth ratio compares."""
    max_concurrent_agents: int | None
    """Model calls in flight at once. None: 20, surplus waits."""
    on_surplus: Literal["queue", "refuse"] | None
    """What surplus model calls do: wait, or be refused (the default once max_concurrent_agents is set)."""
    max_fan_out: int | None
    """Branches one node may start at once. None: 100, or unlimited once max_concurrent_agents is set."""
    max_tool_result_chars: int | None
    """Larger tool answers are kept out of the history."""
    max_nudges: int
    """Nudges in one run."""
    tools: Mapping[str, ToolRule | Mapping[str, Any]]
    """Rules per tool name or glob."""
    tool_result_normalizer: Mapping[str, Callable[[Any], Any]]
    """Per tool: what of an answer counts for its identity."""
    on_trip: Callable[..., Any] | None
    """Called with each Trip, off the path of the run."""
    on_decision: Callable[..., Any] | None
    """Called with each decision that is not allow, off the path of the run."""
    clock: Callable[[], float] | None
    """Seconds; for tests and replay. None: the system's clock."""


class PolicySettings(CommonSettings, total=False):
    """Settings of a guard that sees agents and their tools."""

    max_tool_calls: int | None
    """Tool calls of the run tree."""
    final_answer: bool | str
    """Let a stopped agent answer once, without tools; the price is held from the start. Or the instruction."""
    max_context_tokens: int | None
    """Largest prompt of one model call. None: the model's context window, where it is known."""
    context_headroom: int | None
    """Tokens of the context to keep free."""
    max_tool_failures: int | None
    """Failures in a row that a tool may have in one run, and across runs before its breaker opens."""
    max_reentries: int | None
    """Stop at this many hand-offs back to an agent of the same chain. 1 stops A→B→A. None: a return is normal."""
    max_delegation_depth: int | None
    """Delegations made by a model, one inside the other."""
    max_cycle_len: int | None
    """Longest circle of calls or hand-offs that cycle_repeats looks for."""
    cycle_repeats: int | None
    """Stop at this many rounds of one circle of calls, or of hand-offs between agents."""
    half_open_reset_seconds: float
    """How long an open breaker waits before its one probe."""
    rules: Mapping[str, Mapping[str, float] | Literal[False]]
    """Rungs per rule, or false to switch a rule off."""
    remote_agents: Mapping[str, RemoteAgent | Mapping[str, Any]]
    """Model and budget of remote A2A agents, by name or glob."""
    trust_remote_budget: bool
    """Let the budget in an A2A request lower the limits of its run. It never raises them."""
    tokens: Callable[..., Any] | None
    """Counts the tokens of a request, now or awaited. None: estimated, exact after the first call."""


class BudgetSettings(TypedDict, total=False):
    """``budget=`` of a guarded function."""

    max_usd: Dollars
    """Dollars of one run."""
    max_tokens: int
    """Tokens of one run, input and output."""
    max_calls: int
    """Calls of one run."""
    per_minute: Dollars | Mapping[str, Dollars]
    """Dollars in any minute over all runs, or a mapping of ``max_usd``, ``max_tokens`` and ``max_calls``."""
    per_hour: Dollars | Mapping[str, Dollars]
    """The same for an hour."""
    per_day: Dollars | Mapping[str, Dollars]
    """The same for a day."""
    per_week: Dollars | Mapping[str, Dollars]
    """The same for a week."""
    per_month: Dollars | Mapping[str, Dollars]
    """The same for a calendar month."""


class LoopSettings(TypedDict, total=False):
    """``loop=`` of a guarded function."""

    repeats: int
    """Rounds of one cycle of calls at which the function stops. Default: 3."""
    max_cycle_len: int
    """The longest cycle to look for, in calls. Default: 4."""
    by: Literal["result", "call", "name"]
    """What makes two calls equal. Default:
    ``"result"``, the same call, or the same tool with nothing new in its results.
    """


class ContextSettings(TypedDict, total=False):
    """``context=`` of a guarded function."""

    max_context_tokens: int
    """Largest prompt of one call."""
    headroom: int
    """Tokens of the context to keep free."""


class BreakerSettings(TypedDict, total=False):
    """``breaker=`` of a guarded function."""

    failures: int
    """Failures in a row after which calls are refused. Default: 5."""
    reset_seconds: float
    """Seconds until one call may probe. Default: 60."""


class FunctionSettings(CommonSettings, total=False):
    """Settings of ``guard``, ``guard_async`` and ``run``."""

    name: str
    """The name in trips and figures. Default: the function's own."""
    budget: BudgetSettings | Mapping[str, Any] | Budget | Sequence[Budget]
    """Limits on dollars, tokens and calls."""
    loop: LoopSettings | Mapping[str, Any] | bool
    """Stop when the same calls come again and again."""
    context: ContextSettings | Mapping[str, Any]
    """Stop before a prompt that is too large."""
    breaker: BreakerSettings | Mapping[str, Any] | bool
    """Refuse calls for a while after failures in a row."""
    tokens: Callable[..., Any]
    """Counts the prompt's tokens, given the call's arguments. Default: estimated."""
    signature: Callable[[Any], Any]
    """What a result did, for ``loop``; None leaves it out."""
    cost: Dollars | Callable[..., Any]
    """Dollars of every call, or a function of the result, or one of input and output tokens."""
