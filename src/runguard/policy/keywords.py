"""The keywords of guards, for editors and type checkers.

``python docs/settings_table.py`` writes ``CommonSettings`` and ``PolicySettings`` from the fields of ``Policy``, which
also checks the values. The settings of guarded functions follow; ``calls/function_settings`` reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypedDict

from runguard.core.decision import Trip
from runguard.core.money import Budget
from runguard.policy.settings import RemoteAgent, ToolRule
from runguard.pricing.book import ModelLimits, Price

Dollars = int | float | str | Decimal
PriceOf = Price | Mapping[str, Any]
Alerts = str | Callable[..., Any] | Mapping[str, Any] | Sequence[str | Callable[..., Any] | Mapping[str, Any]]


# ---- Settings of a policy: written by docs/settings_table.py.


class CommonSettings(TypedDict, total=False):
    """Settings of every guard."""

    # enforce acts, shadow only records what it would have done, off does nothing.
    mode: Literal["enforce", "shadow", "off"]
    # stop ends the run with a final event; raise does that and then raises RunStoppedError to the caller.
    on_stop: Literal["stop", "raise"]
    # What a fault of the guard means. Under a budget, allow makes only reserved calls. Stores follow on_outage.
    on_guard_error: Literal["allow", "block"]
    # With a durable store, keep each run's journal in it: names, numbers and digests, for replay and the dashboard.
    journal: bool
    # Report to OpenTelemetry, where its API is installed.
    telemetry: bool
    # Where to send stops, thresholds and outages: Slack, PagerDuty, webhooks, the log, functions.
    alerts: Alerts
    # What the end user reads after a stop: a text, texts by rule with a default, or a function of the trip.
    stop_text: str | Mapping[str, str] | Callable[[Trip], str] | None
    # Model calls of the run tree. None: the framework's own limit (ADK: 500), held for the tree.
    max_model_calls: int | None
    # Wall clock of the run.
    max_seconds: float | None
    # Dollars of the run tree.
    max_usd: Dollars | None
    # Tokens of the run tree, input and output.
    max_tokens: int | None
    # Limits per session, user, app, agent, model, tool or label, with windows.
    budgets: Sequence[Budget | Mapping[str, Any]]
    # USD per million tokens, by model id or glob: adds to and overrides the price list.
    prices: Mapping[str, PriceOf | Sequence[PriceOf]]
    # Context window and output limit, by model id or glob, where they are not known or differ.
    models: Mapping[str, ModelLimits | Mapping[str, Any]]
    # A dollar limit and a model without a price: refuse the call, count tokens only, or take this price.
    on_unpriced: Literal["refuse", "tokens"] | PriceOf
    # The price list: the newest table, or the installed genai-prices package with its own updates.
    prices_source: Literal["table", "genai-prices"]
    # When the rest of a budget cannot pay for a full answer, the answer is capped, down to this.
    min_output_tokens: int
    # Where accounts are kept: memory, sqlite:///path, redis://..., postgresql://... .
    store: str
    # Seconds that one call of the store may take.
    store_timeout: float
    # The store is away or damaged: closed makes no paid call without an account, open goes on and books later.
    on_outage: Literal["closed", "open"]
    # After this time the reservation of a worker that never came back is charged.
    hold_seconds: float
    # How long a store keeps records, ended runs and past periods.
    retention_days: float
    # How long a call may wait: for other calls' reservations, a budget that waits, or the provider.
    max_wait_seconds: float
    # After a 429 or 503 with Retry-After, calls to that model wait or pass. None: as budgets do.
    on_rate_limit: Literal["wait", "pass"] | None
    # Stop at this many equal answers of one tool in a row, whatever it was asked. Acknowledgements are free.
    max_identical_tool_results: int | None
    # Stop at this many equal hand-offs without news.
    max_handoff_repeats: int | None
    # Refuse an input that was submitted again this often within an hour, after runs that ended in the same way.
    max_resubmissions: int | None
    # Stop when an agent's prompts have grown to this many times its first ones in the session.
    max_event_cost_ratio: float | None
    # How many first and last model calls the growth ratio compares.
    cost_baseline_events: int
    # Model calls in flight at once. None: 20, surplus waits.
    max_concurrent_agents: int | None
    # What surplus model calls do: queue, or refuse (the default once max_concurrent_agents is set).
    on_surplus: Literal["queue", "refuse"] | None
    # Branches one node may start at once. None: 100, or unlimited once max_concurrent_agents is set.
    max_fan_out: int | None
    # Larger tool answers are kept out of the history.
    max_tool_result_chars: int | None
    # Nudges in one run.
    max_nudges: int
    # Rules per tool name or glob.
    tools: Mapping[str, ToolRule | Mapping[str, Any]]
    # Per tool: what of an answer counts for its identity.
    tool_result_normalizer: Mapping[str, Callable[[Any], Any]]
    # Called with each Trip, off the path of the run.
    on_trip: Callable[..., Any] | None
    # Called with each decision that is not allow, off the path of the run.
    on_decision: Callable[..., Any] | None
    # Seconds; for tests and replay. None: the system's clock.
    clock: Callable[[], float] | None


class PolicySettings(CommonSettings, total=False):
    """Settings of a guard that sees agents and their tools."""

    # Tool calls of the run tree.
    max_tool_calls: int | None
    # Largest prompt of one model call. None: the model's context window, where it is known.
    max_context_tokens: int | None
    # Tokens of the context to keep free.
    context_headroom: int
    # Failures in a row that a tool may have in one run, and across runs before its breaker opens.
    max_tool_failures: int | None
    # Stop at this many re-entries of an agent into its own chain of delegations. 1 stops A→B→A.
    max_reentries: int | None
    # Delegations made by a model, one inside the other.
    max_delegation_depth: int | None
    # Longest circle of calls or hand-offs that cycle_repeats looks for.
    max_cycle_len: int | None
    # Stop at this many rounds of one circle of calls, or of hand-offs between agents.
    cycle_repeats: int | None
    # How long an open breaker waits before its one probe.
    half_open_reset_seconds: float
    # Let a stopped agent answer once, without tools; the price is held from the start. Or the instruction.
    final_answer: bool | str
    # Tell the model what is left when 50, 80 and 95 % of a limit are spent; or other shares.
    budget_notice: bool | Sequence[float]
    # Rungs per rule, or false to switch a rule off.
    rules: Mapping[str, Mapping[str, float] | Literal[False]]
    # Model and budget of remote A2A agents, by name or glob.
    remote_agents: Mapping[str, RemoteAgent | Mapping[str, Any]]
    # Let the budget in an A2A request lower the limits of its run. It never raises them.
    trust_remote_budget: bool
    # Counts the tokens of a request, now or awaited. None: estimated, exact after the first call.
    tokens: Callable[..., Any] | None


# ---- Settings of ``guard``, ``guard_async`` and ``run``.


class BudgetSettings(TypedDict, total=False):
    """``budget=`` of a guarded function."""

    # Dollars of one run.
    max_usd: Dollars
    # Tokens of one run, input and output.
    max_tokens: int
    # Calls of one run.
    max_calls: int
    # Dollars in any minute over all runs, or a mapping of ``max_usd``, ``max_tokens`` and ``max_calls``.
    per_minute: Dollars | Mapping[str, Dollars]
    # The same for an hour.
    per_hour: Dollars | Mapping[str, Dollars]
    # The same for a day.
    per_day: Dollars | Mapping[str, Dollars]
    # The same for a week.
    per_week: Dollars | Mapping[str, Dollars]
    # The same for a calendar month.
    per_month: Dollars | Mapping[str, Dollars]


class LoopSettings(TypedDict, total=False):
    """``loop=`` of a guarded function."""

    # Rounds of one cycle of calls at which the function stops. Default: 3.
    repeats: int
    # The longest cycle to look for, in calls. Default: 4.
    max_cycle_len: int
    # What makes two calls equal. Default: "result", the same call, or the same tool with nothing new in its results.
    by: Literal["result", "call", "name"]


class ContextSettings(TypedDict, total=False):
    """``context=`` of a guarded function."""

    # Largest prompt of one call.
    max_context_tokens: int
    # Tokens of the context to keep free.
    headroom: int


class BreakerSettings(TypedDict, total=False):
    """``breaker=`` of a guarded function."""

    # Failures in a row after which calls are refused. Default: 5.
    failures: int
    # Seconds until one call may probe. Default: 60.
    reset_seconds: float


class FunctionSettings(CommonSettings, total=False):
    """Settings of ``guard``, ``guard_async`` and ``run``."""

    # The name in trips and figures. Default: the function's own.
    name: str
    # Limits on dollars, tokens and calls.
    budget: BudgetSettings | Mapping[str, Any] | Budget | Sequence[Budget]
    # Stop when the same calls come again and again.
    loop: LoopSettings | Mapping[str, Any] | bool
    # Stop before a prompt that is too large.
    context: ContextSettings | Mapping[str, Any]
    # Refuse calls for a while after failures in a row.
    breaker: BreakerSettings | Mapping[str, Any] | bool
    # Counts the prompt's tokens, given the call's arguments. Default: estimated.
    tokens: Callable[..., Any]
    # What a result did, for ``loop``; None leaves it out.
    signature: Callable[[Any], Any]
    # Dollars of every call, or a function of the result, or one of input and output tokens.
    cost: Dollars | Callable[..., Any]
