"""Everything that a ``runguard.toml`` may say, with units, limits and defaults. Keywords have the same names."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from runguard.alerts.alert_settings import AlertSettings
from runguard.core.errors import PolicyError
from runguard.ledger.memory import check_store
from runguard.policy.model_switches import fault_of_switches
from runguard.policy.remote_agent_rules import RemoteAgent
from runguard.policy.rule_defaults import check_rule
from runguard.policy.tool_rules import ToolRule
from runguard.policy.values import Count, Duration, OneBudget, Ratio, Receivers, RungNumber, Seconds, Usd
from runguard.pricing.book import ModelLimits, Price, PricesSource, missing_source
from runguard.validation import SettingsModel

# Names that other functions and libraries use, and what a policy calls them.
_MEANT: Final = {
    "budget": (
        "max_usd=, max_tokens= or max_model_calls= for one run, or budgets=[Budget(usd=5, per='user', window='1d')]"
    ),
    "loop": "cycle_repeats= and max_cycle_len=, or rules={'repetition': {'stop': 5}}",
    "context": "max_context_tokens= and context_headroom=",
    "breaker": "max_tool_failures= and half_open_reset_seconds=",
    **dict.fromkeys(
        ("max_cost", "max_cost_usd", "cost_limit", "budget_usd", "usd", "max_dollars", "dollars", "max_spend"),
        "max_usd=",
    ),
    **dict.fromkeys(("max_total_tokens", "token_limit", "token_budget"), "max_tokens="),
    **dict.fromkeys(
        ("max_calls", "max_llm_calls", "max_iterations", "max_turns", "max_steps", "max_iter", "recursion_limit"),
        "max_model_calls=",
    ),
    **dict.fromkeys(("timeout", "timeout_seconds", "max_execution_time", "deadline"), "max_seconds="),
    **dict.fromkeys(("slack_webhook", "pagerduty_key", "webhook"), "alerts={'slack_webhook': 'env:SLACK_URL'}"),
}
_SHAPES: Final[dict[str | int, str]] = {
    "prices": "give {'model-id': {'input': 3, 'output': 15}} in USD per million tokens",
    "models": "give {'model-id': {'context_window': 200_000, 'max_output_tokens': 8_192}}",
    "on_unpriced": "give 'refuse', 'tokens', or a price such as {'input': 3, 'output': 15}",
    "budgets": "give a list of Budget(...) or of tables such as {'usd': 5, 'per': 'user', 'window': '1d'}",
}


class PolicyFile(SettingsModel):
    """Everything that a ``runguard.toml`` may say; keywords have the same names."""

    parts: ClassVar[Mapping[str, type[BaseModel]]] = {
        "tools": ToolRule,
        "remote_agents": RemoteAgent,
        "prices": Price,
        "models": ModelLimits,
        "on_unpriced": Price,
    }
    meant: ClassVar[Mapping[str, str]] = _MEANT
    shapes: ClassVar[Mapping[str | int, str]] = _SHAPES

    mode: Literal["enforce", "shadow", "off"] = Field(
        default="enforce", description="enforce acts, shadow only records what it would have done, off does nothing."
    )
    on_stop: Literal["stop", "raise"] = Field(
        default="stop",
        description=(
            "stop ends the run with a final event; raise does that and then raises RunStoppedError to the caller."
        ),
    )
    on_guard_error: Literal["allow", "block"] = Field(
        default="allow",
        description="What a failure inside the guard means for the run. Faults of the store follow on_outage.",
    )
    journal: bool = Field(
        default=True,
        description=(
            "With a durable store, keep each run's journal in it: names, numbers and digests, for replay and the "
            "dashboard."
        ),
    )
    telemetry: bool = Field(default=True, description="Report to OpenTelemetry, where its API is installed.")
    alerts: Receivers = Field(
        default=AlertSettings(),
        description="Where to send stops, thresholds and outages: Slack, PagerDuty, webhooks, the log, functions.",
    )
    stop_text: str | None = Field(
        default=None,
        min_length=1,
        description="What the end user reads after a stop, instead of the built-in sentence.",
    )
    max_model_calls: Count | None = Field(
        default=None,
        description="Model calls of the run tree. None: the framework's own limit (ADK: 500), held for the tree.",
    )
    max_tool_calls: Count | None = Field(default=1000, description="Tool calls of the run tree.")
    max_seconds: Duration | None = Field(default=None, description="Wall clock of the run.")
    max_usd: Usd | None = Field(default=None, description="Dollars of the run tree.")
    max_tokens: Annotated[int, Field(ge=1, le=10**15)] | None = Field(
        default=None, description="Tokens of the run tree, input and output."
    )
    max_context_tokens: Count | None = Field(
        default=None,
        description="Largest prompt of one model call. None: the model's context window, where it is known.",
    )
    context_headroom: Annotated[int, Field(ge=0, le=10**9)] = Field(
        default=0, description="Tokens of the context to keep free."
    )
    budgets: tuple[OneBudget, ...] = Field(
        default=(),
        strict=False,
        description="Limits per session, user, app, agent, model, tool or label, with windows.",
    )
    prices: dict[str, Price | list[Price]] = Field(
        default={}, description="USD per million tokens, by model id or glob: adds to and overrides the price list."
    )
    models: dict[str, ModelLimits] = Field(
        default={},
        description="Context window and output limit, by model id or glob, where they are not known or differ.",
    )
    on_unpriced: Literal["refuse", "tokens"] | Price = Field(
        default="refuse",
        description=(
            "A dollar limit and a model without a price: refuse the call, count tokens only, or take this price."
        ),
    )
    prices_source: PricesSource = Field(
        default="table",
        description="The price list: the table of this release, or the installed genai-prices package.",
    )
    min_output_tokens: Count = Field(
        default=1024,
        description="When the rest of a budget cannot pay for a full answer, the answer is capped, down to this.",
    )
    store: str = Field(
        default="memory",
        min_length=1,
        description="Where accounts are kept: memory, sqlite:///path, redis://..., postgresql://... .",
    )
    store_timeout: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = Field(
        default=1.0, description="Seconds that one call of the store may take."
    )
    on_outage: Literal["closed", "open"] = Field(
        default="closed",
        description=(
            "The store is away or damaged: closed makes no paid call without an account, open goes on and books later."
        ),
    )
    hold_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        default=900.0, description="After this time the reservation of a worker that never came back is charged."
    )
    retention_days: Annotated[float, Field(gt=0, le=3660, allow_inf_nan=False)] = Field(
        default=30.0, description="How long a store keeps records, ended runs and past periods."
    )
    max_wait_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = Field(
        default=60.0,
        description="How long a call may wait: for other calls' reservations, a budget that waits, or the provider.",
    )
    on_rate_limit: Literal["wait", "pass"] | None = Field(
        default=None,
        description="After a 429 or 503 with Retry-After, calls to that model wait or pass. None: as budgets do.",
    )
    max_identical_tool_results: Annotated[int, Field(ge=2, le=10**9)] | None = Field(
        default=None, description="Stop at this many equal failures of a tool, or equal answers to the same call."
    )
    max_tool_failures: Count | None = Field(
        default=None,
        description="Failures in a row that a tool may have in one run, and across runs before its breaker opens.",
    )
    max_handoff_repeats: Annotated[int, Field(ge=2, le=10**9)] | None = Field(
        default=None, description="Stop at this many equal hand-offs without news."
    )
    max_reentries: Count | None = Field(
        default=None,
        description=(
            "Stop at this many hand-offs back to an agent of the same chain. 1 stops A→B→A. None: a return is normal."
        ),
    )
    max_delegation_depth: Count | None = Field(
        default=5, description="Delegations made by a model, one inside the other."
    )
    max_cycle_len: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="Longest circle of calls or hand-offs that cycle_repeats looks for."
    )
    cycle_repeats: Annotated[int, Field(ge=2, le=10**6)] | None = Field(
        default=None, description="Stop at this many rounds of one circle of calls, or of hand-offs between agents."
    )
    max_event_cost_ratio: Ratio | None = Field(
        default=None,
        description="Stop when an agent's prompts have grown to this many times its first ones in the session.",
    )
    cost_baseline_events: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=5, description="How many first and last model calls the growth ratio compares."
    )
    max_concurrent_agents: Count | None = Field(
        default=None, description="Model calls in flight at once. None: 20, surplus waits."
    )
    on_surplus: Literal["queue", "refuse"] | None = Field(
        default=None,
        description="What surplus model calls do: wait, or be refused (the default once max_concurrent_agents is set).",
    )
    max_fan_out: Count | None = Field(
        default=None,
        description="Branches one node may start at once. None: 100, or unlimited once max_concurrent_agents is set.",
    )
    max_tool_result_chars: Count | None = Field(
        default=None, description="Larger tool answers are kept out of the history."
    )
    half_open_reset_seconds: Seconds = Field(
        default=60.0, description="How long an open breaker waits before its one probe."
    )
    final_answer: bool | Annotated[str, Field(min_length=1)] = Field(
        default=False,
        description=(
            "Let a stopped agent answer once, without tools; the price is held from the start. Or the instruction."
        ),
    )
    max_nudges: Annotated[int, Field(ge=0, le=1000)] = Field(default=2, description="Nudges in one run.")
    rules: dict[str, dict[str, RungNumber] | bool] = Field(
        default={}, description="Rungs per rule, or false to switch a rule off."
    )
    tools: dict[str, ToolRule] = Field(default={}, description="Rules per tool name or glob.")
    remote_agents: dict[str, RemoteAgent] = Field(
        default={}, description="Model and budget of remote A2A agents, by name or glob."
    )
    trust_remote_budget: bool = Field(
        default=False,
        description="Let the budget in an A2A request lower the limits of its run. It never raises them.",
    )

    @field_validator("rules")
    @classmethod
    def _rules_can_fire(cls, rules: dict[str, dict[str, float] | bool]) -> dict[str, dict[str, float] | bool]:
        for rule, rungs in rules.items():
            check_rule(rule, rungs)
        return rules

    @field_validator("prices_source")
    @classmethod
    def _price_list_is_installed(cls, source: PricesSource) -> PricesSource:
        if missing := missing_source(source):
            raise ValueError(missing)
        return source

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, url: str) -> str:
        try:
            check_store(url)
        except PolicyError as error:
            raise ValueError(str(error)) from None
        return url

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.max_cycle_len is not None and self.cycle_repeats is None:
            raise ValueError("max_cycle_len does nothing alone; add cycle_repeats, the number of rounds to stop at")
        if self.max_context_tokens is not None and self.context_headroom >= self.max_context_tokens:
            raise ValueError(
                f"context_headroom = {self.context_headroom} leaves nothing of max_context_tokens = "
                f"{self.max_context_tokens}"
            )
        if self.on_surplus is not None and self.max_concurrent_agents is None and self.on_surplus == "refuse":
            raise ValueError(
                "on_surplus='refuse' needs max_concurrent_agents, the number of model calls to allow at once"
            )
        if fault := fault_of_switches(self.budgets, self.prices, self.models, self.prices_source):
            raise ValueError(f"budgets: {fault}")
        return self


def policy_schema() -> dict[str, Any]:
    """JSON Schema of ``runguard.toml``, for editors and checks."""
    return PolicyFile.model_json_schema(mode="validation")
