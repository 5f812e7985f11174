"""Keywords, or ``runguard.toml`` and ``pyproject.toml`` -> a frozen ``Policy``.

Invalid settings are rejected here, never in the middle of a run. The adapters and ``calls/functions`` build a policy,
``engine`` obeys it, ``cli`` reads its file. ``Policy.build`` says which setting wins.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from runguard import background  # noqa: F401 - its filter keeps every log line on one line
from runguard.background import off_loop
from runguard.core.decision import STOPPING_RULES, Rungs, Trip
from runguard.core.errors import PolicyError, did_you_mean
from runguard.core.money import KINDS, Budget, Per, Threshold, dollars_of, to_nano
from runguard.ledger.memory import check_store
from runguard.pricing.book import ModelLimits, Price, PricesSource, Pricing, missing_source
from runguard.pricing.rates import Rates, Unpriced, Usage
from runguard.reporting.alerts import SCHEMA as ALERTS_SCHEMA
from runguard.reporting.alerts import AlertSettings
from runguard.validation import SettingsModel, faults_of, summary

# ---- The types of single settings: counts, durations, dollars, budgets and the receivers of alerts.

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Seconds = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0.001, le=10**9, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=1, le=10**6, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
RungNumber = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False)]
_T = TypeVar("_T")
_AMOUNT: Final = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}]}


Usd = Annotated[Decimal, BeforeValidator(dollars_of), WithJsonSchema(_AMOUNT)]


def _written(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


WrittenText = Annotated[str, AfterValidator(_written), WithJsonSchema({"type": "string", "pattern": r"\S"})]


def _tool_price(value: object) -> object:
    """Validate dollars, 0 included, or a function."""
    if callable(value):
        return value
    try:
        return dollars_of(value, least=0)
    except ValueError as fault:
        raise ValueError(f"{fault}, or give a function") from None


ToolPrice = Annotated[
    Any,
    BeforeValidator(_tool_price),
    PlainSerializer(lambda price: "function" if callable(price) else str(price)),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}),
]

_BUDGET_SCHEMA: Final = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "usd": _AMOUNT,
        "tokens": {"type": "integer", "minimum": 1},
        "calls": {"type": "integer", "minimum": 1},
        "per": {
            "type": "string",
            "default": "run",
            "description": f"{', '.join(KINDS)}; 'agent:research*' by name, 'run+agent' for both at once.",
        },
        "window": {
            "type": "string",
            "description": "'1m', '1h', '1d', '1w' or 'month'; none: for as long as the ledger lives.",
        },
        "tz": {"type": "string", "description": "Time zone by whose calendar days, weeks and months begin."},
        "on_exhausted": {
            "enum": ["refuse", "wait"],
            "default": "refuse",
            "description": "A call that does not fit: refuse it, or let it wait for room, at most max_wait_seconds.",
        },
        "burn_alert": {"type": "boolean", "default": False},
        "thresholds": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "object"}]}},
    },
}


def _checked(read: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Return a validator from a function that raises ``PolicyError``."""

    def validate(given: Any) -> _T:
        try:
            return read(given)
        except PolicyError as error:
            raise ValueError(str(error)) from None

    return validate


OneBudget = Annotated[
    InstanceOf[Budget],
    BeforeValidator(_checked(Budget.of)),
    PlainSerializer(Budget.to_dict),
    WithJsonSchema(_BUDGET_SCHEMA),
]


Receivers = Annotated[
    InstanceOf[AlertSettings],
    BeforeValidator(_checked(AlertSettings.parse)),
    PlainSerializer(AlertSettings.to_dict),
    WithJsonSchema(ALERTS_SCHEMA),
]


# ---- One remote A2A agent.


class RemoteAgent(SettingsModel):
    """What is known of one remote A2A agent. By name or glob in ``remote_agents=``."""

    model: str = Field(
        default="",
        description="The model whose price counts for the tokens that a reply reports. Empty: only tokens are counted.",
    )
    send_budget: bool = Field(
        default=False,
        description="Reserve what is left of the budgets and send it with the request, as a limit for the remote run.",
    )
    max_usd: Usd | None = Field(default=None, description="Dollars to reserve for one call of the agent.")
    max_tokens: Count | None = Field(default=None, description="Tokens to reserve for one call of the agent.")


LEAST_HELD: Final = 1  # what shows that something is left


def reserved_for(rule: RemoteAgent) -> tuple[int | None, int | None]:
    """Return the nano-USD and tokens to reserve for a call; None stands for all that is left.

    Without a figure and without ``send_budget``, it is the smallest amount, which shows that something is left.
    """
    least = None if rule.send_budget else LEAST_HELD
    return (
        least if rule.max_usd is None else to_nano(rule.max_usd),
        least if rule.max_tokens is None else rule.max_tokens,
    )


# ---- One tool.


class ToolRule(SettingsModel):
    """The settings of one tool.

    By name or glob in ``tools=``, or beside the tool with ``@runguard.tool(...)``.
    """

    polling: bool = Field(
        default=False, description="Asks for a state until it changes: judged by time without change, not by count."
    )
    paging: bool = Field(
        default=False,
        description=(
            "Moves on with every call, whatever it answers (next page, scroll): repetition rules leave it alone."
        ),
    )
    max_calls: Count | None = Field(default=None, description="Calls allowed in one run, the whole tree counted.")
    max_seconds: Duration | None = Field(
        default=None, description="An async call is ended after this time; a sync one is judged when it returns."
    )
    writes: bool = Field(
        default=False,
        description="Changes the world: its success is progress, so reading again afterwards is no repetition.",
    )
    once: bool = Field(
        default=False, description="A success with the same arguments is not repeated within the session."
    )
    exempt: bool = Field(
        default=False, description="No loop or failure rule looks at this tool; limits still count it."
    )
    identity: tuple[str, ...] | None = Field(
        default=None, description="The only arguments that make two calls different.", strict=False
    )
    volatile: tuple[str, ...] = Field(
        default=(), description="Arguments, and top-level fields of the answer, that never count.", strict=False
    )
    failed: dict[str, Any] | Callable[[Any], bool] | None = Field(
        default=None,
        description="What counts as failure: fields with the values that say so, or a function of the answer.",
    )
    price: ToolPrice | None = Field(
        default=None,
        description="Dollars of one call, reserved before it runs; or a function of its arguments and its answer.",
    )
    price_bound: ToolPrice | None = Field(
        default=None,
        description="The most that one call may cost, or a function of its arguments; for a price that is a function.",
    )

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.exempt and (self.polling or self.paging):
            raise ValueError(
                "exempt already takes the tool out of the rules that polling and paging tune; keep one of them"
            )
        if self.failed == {}:
            raise ValueError("failed names no field that says failure; give one such as {'status': 'error'}")
        if callable(self.price) and self.price_bound is None:
            raise ValueError(
                "price is a function, known only after the call; add price_bound, the most that one call may cost"
            )
        if self.price_bound is not None and not callable(self.price):
            raise ValueError("price_bound needs a price that is a function of the arguments and the answer")
        return self


def declared_rule(**options: Any) -> ToolRule:
    """Return a ToolRule made from the keywords of ``@runguard.tool(...)``. Raise PolicyError for invalid ones."""
    try:
        return ToolRule.model_validate(options)
    except ValidationError as error:
        raise PolicyError(summary(faults_of(error, ToolRule), "@runguard.tool")) from None


def tool(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a ToolRule beside the tool itself: ``@runguard.tool(once=True)``.

    The policy's rule for that name wins.
    """
    rule = declared_rule(**options)

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__runguard_tool__ = rule  # type: ignore[attr-defined]
        return function

    return declare


# ---- Everything that a ``runguard.toml`` may say, with units, limits and defaults.

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
    **dict.fromkeys(
        ("policy", "config", "file", "path", "policy_file", "config_file", "policy_path", "config_path"),
        "a runguard.toml, found upward from the working directory, or the variable RUNGUARD_POLICY",
    ),
    **dict.fromkeys(("app", "user", "session"), "your framework's own names, or a block 'with runguard.run(user=…)'"),
    **dict.fromkeys(("timeout", "timeout_seconds", "max_execution_time", "deadline"), "max_seconds="),
    **dict.fromkeys(("slack_webhook", "pagerduty_key", "webhook"), "alerts={'slack_webhook': 'env:SLACK_URL'}"),
    **dict.fromkeys(
        ("per", "window", "thresholds", "on_exhausted", "burn_alert"),
        "budgets=[Budget(usd=5, per='user', window='1d', …)], in a file [[budgets]]",
    ),
}
_SHAPES: Final[dict[str | int, str]] = {
    "tools": "give {'tool-name': {'polling': True}}, in a file [tools.tool-name]",
    "rules": "give {'stall': {'stop': 5}}, in a file [rules] and stall = {stop = 5}",
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
        description=(
            "What a fault of the guard means. Under a budget, allow makes only reserved calls. Stores follow on_outage."
        ),
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
    stop_text: WrittenText | dict[str, WrittenText] | None = Field(
        default=None,
        description=(
            "What the end user reads after a stop: a text, texts by rule with a default, or a function of the trip."
        ),
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
    prices: dict[WrittenText, Price | list[Price]] = Field(
        default={}, description="USD per million tokens, by model id or glob: adds to and overrides the price list."
    )
    models: dict[WrittenText, ModelLimits] = Field(
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
        description="The price list: the newest table, or the installed genai-prices package with its own updates.",
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
        default=None,
        description=(
            "Stop at this many equal answers of one tool in a row, whatever it was asked. Acknowledgements are free."
        ),
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
        description=("Stop at this many re-entries of an agent into its own chain of delegations. 1 stops A→B→A."),
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
    max_resubmissions: Annotated[int, Field(ge=0, le=10**9)] | None = Field(
        default=None,
        description=(
            "Refuse an input that was submitted again this often within an hour, after runs that ended in the same way."
        ),
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
        description="What surplus model calls do: queue, or refuse (the default once max_concurrent_agents is set).",
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
    final_answer: bool | WrittenText = Field(
        default=False,
        description=(
            "Let a stopped agent answer once, without tools; the price is held from the start. Or the instruction."
        ),
    )
    max_nudges: Annotated[int, Field(ge=0, le=1000)] = Field(default=2, description="Nudges in one run.")
    budget_notice: bool | Annotated[tuple[Share, ...], Field(min_length=1, max_length=20, strict=False)] = Field(
        default=False,
        description="Tell the model what is left when 50, 80 and 95 % of a limit are spent; or other shares.",
    )
    rules: dict[str, dict[str, RungNumber] | bool] = Field(
        default={}, description="Rungs per rule, or false to switch a rule off."
    )
    tools: dict[WrittenText, ToolRule] = Field(default={}, description="Rules per tool name or glob.")
    remote_agents: dict[WrittenText, RemoteAgent] = Field(
        default={}, description="Model and budget of remote A2A agents, by name or glob."
    )
    trust_remote_budget: bool = Field(
        default=False,
        description="Let the budget in an A2A request lower the limits of its run. It never raises them.",
    )

    @field_validator("stop_text", mode="before")
    @classmethod
    def _stop_text_is_one(cls, given: object) -> object:
        texts = list(given.values()) if isinstance(given, Mapping) else [given]
        if not callable(given) and given is not None and not all(isinstance(one, str) and one for one in texts):
            raise ValueError(
                "give a text, texts by rule such as {'budget': '…', 'default': '…'}, or a function of the trip"
            )
        names = (*STOPPING_RULES, "default")
        if isinstance(given, Mapping) and (unknown := [str(name) for name in given if name not in names]):
            raise ValueError(f"no such rule: '{unknown[0]}'; {did_you_mean(unknown[0], names)}")
        return given

    @field_validator("prices_source")
    @classmethod
    def _price_list_is_installed(cls, source: PricesSource) -> PricesSource:
        if missing := missing_source(source):
            raise ValueError(missing)
        return source

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, url: str) -> str:
        _checked(check_store)(url)
        return url

    def _explicit(self, rule: str) -> dict[str, float]:
        """Return the rungs that the policy sets by a keyword of their own or, which wins, under ``rules``."""
        keyword, rung, more = _SHORTHANDS.get(rule, ("", "", 0))
        number = getattr(self, keyword, None)
        given = self.rules.get(rule)
        return ({} if number is None else {rung: number + more}) | (given if isinstance(given, dict) else {})

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        for rule, given in self.rules.items():
            check_rule(rule, given and self._explicit(rule))  # also a rung under ``rules`` against one of a keyword
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
    """Return the JSON Schema of ``runguard.toml``, for editors and checks."""
    return PolicyFile.model_json_schema(mode="validation")


# ---- The policy: what the file and the keywords say together.


class Policy(PolicyFile):
    """A policy with the parts that only code can give. Frozen; made with ``Policy.build``."""

    tool_result_normalizer: dict[str, Callable[[Any], Any]] = Field(
        default={}, description="Per tool: what of an answer counts for its identity."
    )
    on_trip: Callable[..., Any] | None = Field(
        default=None, description="Called with each Trip, off the path of the run."
    )
    on_decision: Callable[..., Any] | None = Field(
        default=None, description="Called with each decision that is not allow, off the path of the run."
    )
    stop_text: WrittenText | dict[str, WrittenText] | Callable[[Trip], str] | None = Field(  # type: ignore[assignment]
        default=None, description=PolicyFile.model_fields["stop_text"].description
    )
    tokens: Callable[..., Any] | None = Field(
        default=None,
        description="Counts the tokens of a request, now or awaited. None: estimated, exact after the first call.",
    )
    clock: Callable[[], float] | None = Field(
        default=None, description="Seconds; for tests and replay. None: the system's clock."
    )

    @classmethod
    def build(cls, **keywords: Any) -> Self:
        """Return the policy that the environment, keywords, the policy file and defaults give, in this order.

        The first that names a setting decides it. The environment is ``RUNGUARD_MODE`` and ``RUNGUARD_STORE``.
        ``find_policy_file`` says which file applies. Raise PolicyError for invalid settings.
        """
        values, source = off_loop(values_from_file)
        if keywords:
            values, source = {**values, **keywords}, "keywords" if not values else f"{source} and keywords"
        for name in ("mode", "store"):
            variable = f"RUNGUARD_{name.upper()}"
            if os.environ.get(variable):
                values[name] = os.environ[variable]
                source = variable if not source else f"{source} and {variable}"
        return cls.validated(values, source)

    @classmethod
    def validated(cls, values: Mapping[str, Any], source: str) -> Self:
        """Return a policy of these values, where None means the default for most settings.

        ``source`` names where they come from. Raise PolicyError for invalid settings.
        """
        values = {
            key: value for key, value in values.items() if value is not None or key in _NONE_MEANS_OFF or key == "mode"
        }
        if isinstance(values.get("rules"), Mapping):
            values["rules"] = {rule: (dict(r) if isinstance(r, Mapping) else r) for rule, r in values["rules"].items()}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise PolicyError(summary(faults_of(error, cls), source)) from None

    @cached_property
    def digest(self) -> str:
        """The name of this policy in trips: equal policies have equal digests, functions aside."""
        left_out: dict[str, Any] = _CODE_ONLY | {"tools": {"__all__": {"failed"}}}
        if callable(self.stop_text):
            left_out["stop_text"] = True
        data = json.dumps(self.model_dump(mode="json", exclude=left_out), sort_keys=True)
        return blake2b(data.encode(), digest_size=6).hexdigest()

    def tool_rule(self, tool: str) -> ToolRule | None:
        """Return the rule for a tool, by its exact name, or else by the first glob that fits."""
        return _by_name(self.tools, tool)

    def remote_agent(self, name: str) -> RemoteAgent:
        """Return what is known of a remote agent, by its exact name, or else by the first glob that fits."""
        return _by_name(self.remote_agents, name) or RemoteAgent()

    def rungs(self, rule: str) -> Rungs | None:
        """Return the rungs in force, or None if the rule is off.

        Explicit rungs are taken as they are, defaults only where they can still fire beside them.
        """
        if self.rules.get(rule) is False:
            return None
        explicit = self._explicit(rule)
        return merge_rungs(RULES[rule][0], explicit) if explicit else RULES[rule][0]

    def is_explicit(self, rule: str) -> bool:
        """Return whether the policy sets a refusal or a stop as early as the default, or earlier.

        Such a rung is obeyed exactly, without the allowances that the defaults make.
        """
        explicit, default = self._explicit(rule), RULES[rule][0]
        return any(
            explicit[name] <= (getattr(default, name) or explicit[name])
            for name in ("block", "stop")
            if name in explicit
        )

    @property
    def fan_out(self) -> int | None:
        """The most branches of one node, or None for no limit.

        A policy that sets the number of calls in flight also decides about fan-out, so it has no default then.
        """
        if self.max_fan_out is not None:
            return self.max_fan_out
        return 100 if self.max_concurrent_agents is None else None

    @property
    def unknown_price(self) -> Price | None:
        """The price for models without a known price, if the policy sets one."""
        return None if isinstance(self.on_unpriced, str) else self.on_unpriced

    @property
    def notice_shares(self) -> tuple[float, ...]:
        """The spent shares of a limit at which the model is told what is left."""
        if isinstance(self.budget_notice, bool):
            return _NOTICE_SHARES if self.budget_notice else ()
        return self.budget_notice

    @property
    def in_flight(self) -> int:
        return self.max_concurrent_agents or 20

    @property
    def waits_for_provider(self) -> bool:
        if self.on_rate_limit is None:
            return any(budget.on_exhausted == "wait" for budget in self.budgets)
        return self.on_rate_limit == "wait"

    @property
    def queues(self) -> bool:
        return self.on_surplus == "queue" or (self.on_surplus is None and self.max_concurrent_agents is None)


def _by_name(rules: Mapping[str, _T], name: str) -> _T | None:
    if name in rules:
        return rules[name]
    return next((rule for glob, rule in rules.items() if fnmatchcase(name, glob)), None)


_SHORTHANDS: Final = {  # rule: the keyword that sets one of its rungs, and what is added to the number
    "repetition": ("max_identical_tool_results", "stop", 0),
    "stall": ("max_identical_tool_results", "stop", 0),
    "tool_failures": ("max_tool_failures", "block", 1),
    "handoff": ("max_handoff_repeats", "stop", 0),
    "cycle": ("cycle_repeats", "stop", 0),
    "resubmission": ("max_resubmissions", "stop", 2),  # the first submission and the allowed ones, then the refused
    "growth": ("max_event_cost_ratio", "stop", 0),
}
_CODE_ONLY: Final = dict.fromkeys(Policy.model_fields.keys() - PolicyFile.model_fields.keys(), True)
_NOTICE_SHARES: Final = (0.5, 0.8, 0.95)
_NONE_MEANS_OFF: Final = frozenset({"max_tool_calls", "max_delegation_depth"})


# ---- The rules of a policy: their default rungs, and which rungs each of them can have.

FREE_RETRIES: Final = 3  # of a call that failed: with them a retry holds as long as a poll
LONG_ANSWERS: Final = Rungs(nudge=5, stop=10)  # default limits of no_news for answers longer than a status
REWORDED: Final = Rungs(nudge=3, stop=6)  # default limits of no_news for one long answer in other words
# default limits of no_news for an agent that is set to work again and again; a state may be checked nine times
ORDERS: Final = Rungs(nudge=4, stop=10)
# default limits of no_news for an agent without tools that is called again and again; words alone are weak evidence
TOLD_AGAIN: Final = Rungs(nudge=6, stop=20)
# limits of stall for answers that look like success and ask to try again; a whole batch may meet a busy service
TRY_AGAIN: Final = Rungs(nudge=5, stop=20)
# default limits of stall for equal failures between which other tools succeed: of one call; of one tool's calls
CALL_FAILS_ON: Final = Rungs(nudge=8, stop=50)
TOOL_FAILS_ON: Final = Rungs(nudge=12, stop=60)
# default limits of same_call for answers that differ in numbers alone; ``block`` stops a call with a long argument
WANDERING: Final = Rungs(nudge=6, block=12, stop=60)
# default limits of talk for agents that have worked with tools and then only write
IDLE: Final = Rungs(nudge=8, stop=12)
RULES: Final[dict[str, tuple[Rungs, frozenset[str]]]] = {
    # rule: default rungs, and the rungs it can have at all. The figures are measured: see benchmarks/detection.py. A
    # call, five unchanged repeats and the one that may find the change are made (a poll, a flaky test, a retry); the
    # eighth is refused.
    "repetition": (Rungs(nudge=4, block=8, stop=9), frozenset({"warn", "nudge", "block", "stop"})),
    "no_news": (Rungs(nudge=7, stop=14), frozenset({"warn", "nudge", "stop"})),
    "same_call": (Rungs(nudge=20, stop=120), frozenset({"warn", "nudge", "stop"})),
    "cycle": (Rungs(), frozenset({"warn", "nudge", "stop"})),
    "stall": (Rungs(nudge=3, block=5, stop=6), frozenset({"warn", "nudge", "withhold", "block", "stop"})),
    "tool_failures": (
        Rungs(nudge=6, block=10, stop=11),
        frozenset({"warn", "nudge", "withhold", "block", "stop"}),
    ),
    "empty": (Rungs(nudge=6, stop=100), frozenset({"warn", "nudge", "withhold", "stop"})),
    "handoff": (Rungs(nudge=4, stop=6), frozenset({"warn", "nudge", "stop"})),
    "talk": (Rungs(nudge=16, stop=40), frozenset({"warn", "nudge", "stop"})),
    "growth": (Rungs(warn=3), frozenset({"warn", "stop"})),
    "context": (Rungs(warn=0.8), frozenset({"warn"})),
    "polling": (Rungs(nudge=600, stop=1800), frozenset({"warn", "nudge", "stop"})),
    "resubmission": (Rungs(warn=3), frozenset({"warn", "stop"})),
}
_LADDER: Final = ("warn", "nudge", "withhold", "block", "stop")
_MEASURES: Final = frozenset({"growth", "polling", "context"})  # ratios, seconds and fractions, not counts
_LEAST: Final = {
    "repetition": 2,
    "same_call": 2,
    "cycle": 2,
    "handoff": 2,
    "resubmission": 2,
    "growth": 1.01,
    "context": 0,
}


def check_rule(rule: str, rungs: Mapping[str, float] | bool) -> None:
    """Raise ValueError when a rule or one of its rungs does not exist, or a rung can never fire."""
    if rule not in RULES:
        raise ValueError(f"rules.{rule}: no such rule; {did_you_mean(rule, RULES)}")
    if rungs is False:
        return
    if rungs is True or not rungs:
        raise ValueError(
            f"rules.{rule} = {'true' if rungs else '{}'} says nothing; leave it out for the defaults, or give rungs "
            "such as {'stop': 5}"
        )
    allowed = RULES[rule][1]
    previous: tuple[str, float] | None = None
    for name, number in rungs.items():
        if name not in _LADDER:
            raise ValueError(f"rules.{rule}.{name}: no such rung; {did_you_mean(name, _LADDER)}")
        if name not in allowed:
            raise ValueError(
                f"rules.{rule}.{name}: this rule has no such rung; it can "
                f"{', '.join(r for r in _LADDER if r in allowed)}"
            )
        if rule not in _MEASURES and number != int(number):
            raise ValueError(f"rules.{rule}.{name} = {number}: this rule counts whole things; give an integer")
        if number < _LEAST.get(rule, 1):
            raise ValueError(f"rules.{rule}.{name} = {number:g}: must be at least {_LEAST.get(rule, 1):g}")
    for name in _LADDER:
        if name not in rungs:
            continue
        if previous is not None and rungs[name] <= previous[1]:
            raise ValueError(
                f"rules.{rule}.{previous[0]} = {previous[1]:g} can never fire: {name} = {rungs[name]:g} comes "
                "first or together"
            )
        previous = (name, rungs[name])


def merge_rungs(default: Rungs, explicit: Mapping[str, float]) -> Rungs:
    """Combine rungs: explicit ones are obeyed exactly, a default stays only where it can still fire beside them."""
    merged: dict[str, float | None] = dict.fromkeys(_LADDER)
    for position, name in enumerate(_LADDER):
        if name in explicit:
            merged[name] = explicit[name]
            continue
        number = getattr(default, name)
        if number is None:
            continue
        weaker = [explicit[n] for n in _LADDER[:position] if n in explicit]
        stronger = [explicit[n] for n in _LADDER[position + 1 :] if n in explicit]
        if all(number > n for n in weaker) and all(number < n for n in stronger):
            merged[name] = number
    if "block" in explicit and "stop" not in explicit:
        merged["stop"] = explicit["block"] + 1  # after one block the next identical attempt stops
    return Rungs(**merged)


# ---- Thresholds that switch to a cheaper model: what is wrong with the models that a policy names.

_USUAL: Final = Usage(input=10_000, output=1_000)  # a call by which two models are compared
_LATEST: Final = math.inf  # the newest price


def switching(budgets: Iterable[Budget]) -> list[tuple[Budget, Threshold]]:
    """Return the thresholds that switch models, with their budgets."""
    return [(budget, one) for budget in budgets for one in budget.thresholds if one.model is not None]


def fault_of_switches(budgets: Iterable[Budget], prices: Mapping[str, Any], models: Any, source: Any) -> str:
    """Return what is wrong with the models that thresholds switch to; an empty text when nothing is."""
    found = switching(budgets)
    if not found:
        return ""
    pricing = Pricing(prices, models, None, source)
    for budget, threshold in found:
        fault = _fault(budget, threshold, pricing)
        if fault:
            return f"Threshold({threshold.percent:g}, model={threshold.model!r}): {fault}"
    return ""


def _fault(budget: Budget, threshold: Threshold, pricing: Pricing) -> str:
    model = threshold.model or ""
    rates = pricing.rates(model, _LATEST)
    if isinstance(rates, Unpriced):
        return f"{rates}; give it with prices={{{model!r}: {{'input': …, 'output': …}}}}"
    if pricing.limits(model)[0] is None:
        return f"its context window is not known; give it with models={{{model!r}: {{'context_window': …}}}}"
    for name in _dearer_than(budget, threshold):
        other = pricing.rates(name, _LATEST)
        if isinstance(other, Rates) and rates.cost(_USUAL) >= other.cost(_USUAL):
            return f"it is not cheaper than {name!r}, which it would replace"
    return ""


def _dearer_than(budget: Budget, threshold: Threshold) -> Iterable[str]:
    """Yield the models that a switch at this threshold replaces, as far as the budget names them."""
    for kind, name in Per.parse(budget.per).parts:
        if kind == "model" and not any(sign in name for sign in "*?["):
            yield name
    for other in budget.thresholds:
        if other.model is not None and other.percent < threshold.percent and other.agents == threshold.agents:
            yield other.model


# ---- Find and read ``runguard.toml``, or ``[tool.runguard]`` in a ``pyproject.toml``.
#
# ``Policy.build`` and the commands ask here. The values are validated in ``policy/settings``.

FILE_NAME: Final = "runguard.toml"


def find_policy_file(start: Path | None = None) -> Path | None:
    """Return the policy file that applies; None when there is none.

    It is the one named by ``RUNGUARD_POLICY``, or else the first ``runguard.toml``, or ``pyproject.toml`` with
    ``[tool.runguard]``, found upward from ``start`` (None: the working directory). Raise PolicyError when a folder or
    file cannot be read.
    """
    named = os.environ.get("RUNGUARD_POLICY")
    if named:
        return Path(named)
    try:
        here = (start or Path.cwd()).resolve()
    except OSError as error:
        raise PolicyError(
            f"the working directory cannot be read: {error}; start from another one, or name the policy file "
            "in RUNGUARD_POLICY"
        ) from None
    for folder in (here, *here.parents):
        if _is_there(folder / FILE_NAME):
            return folder / FILE_NAME
        project = folder / "pyproject.toml"
        if project.is_file() and _mentions_us(project) and load_policy_file(project):
            return project
    return None


def _is_there(path: Path) -> bool:
    """Return whether a path exists, also as a folder or as a link to nothing.

    Reading such a file reports the mistake; skipping it would drop every limit.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise PolicyError(
            f"{path}: cannot be looked for: {error.strerror}; start from another folder, or name the policy "
            "file in RUNGUARD_POLICY"
        ) from None
    return S_ISREG(mode) or S_ISDIR(mode) or S_ISLNK(mode)  # reading a pipe could block


def _mentions_us(project: Path) -> bool:
    try:
        return b"runguard" in project.read_bytes()
    except OSError as error:
        raise PolicyError(f"{project}: cannot be read: {error}") from None


def values_from_file() -> tuple[dict[str, Any], str]:
    path = find_policy_file()
    if path is None:
        return {}, ""
    return load_policy_file(path), str(path)


_RELATIVE_FILE: Final = re.compile(r"sqlite:///(?!/|:memory:)([^?]+)(.*)$")


def load_policy_file(path: Path) -> dict[str, Any]:
    """Return the values of a policy file as they are written. Raise PolicyError when it cannot be read."""
    import tomllib  # most programs have no policy file

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows write a byte order mark
    except FileNotFoundError:
        named = " (named by RUNGUARD_POLICY)" if Path(os.environ.get("RUNGUARD_POLICY") or os.devnull) == path else ""
        raise PolicyError(
            f"{path}: no such policy file{': it is a link to nothing' if path.is_symlink() else ''}{named}"
        ) from None
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: cannot be read: {error}; save it as UTF-8") from None
    except OSError as error:
        if isinstance(error, IsADirectoryError):
            raise PolicyError(f"{path}: is a folder, not a policy file; remove it, or name the file") from None
        raise PolicyError(f"{path}: cannot be read: {error.strerror}; check its permissions") from None
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{path}: not valid TOML: {error}") from None
    if path.name == "pyproject.toml":
        tool = data.get("tool", {})
        data = tool.get("runguard", {}) if isinstance(tool, dict) else {}
        prefix = "tool.runguard."
    else:
        prefix = ""
    if not isinstance(data, dict):
        raise PolicyError(f"{path}: tool.runguard must be a table, not a {type(data).__name__}")
    if fault := _misplaced(data, path.name, prefix):
        raise PolicyError(f"{path}: {fault}")
    store = data.get("store")
    if isinstance(store, str) and (relative := _RELATIVE_FILE.match(store)):
        # The file is found from any folder below: one policy must not become a store in each of them.
        data = {**data, "store": f"sqlite:///{quote(str(path.parent.absolute()))}/{relative[1]}{relative[2]}"}
    return data


def _misplaced(data: Mapping[str, Any], file: str, prefix: str) -> str:
    """Return what is wrong with the headings of the tables; nothing where all is fine."""
    for heading, outer in (("runguard", data), ("tool.runguard", data.get("tool"))):
        if isinstance(outer, dict) and isinstance(outer.get("runguard"), dict):
            where = f"in [{prefix.rstrip('.')}]" if prefix else "at the top level"
            return f"[{prefix}{heading}]: settings stand {where} of {file}; move them there and remove this heading"
    for name in ("budgets", "budget"):
        value = data.get(name)
        if isinstance(value, dict) or (name == "budget" and isinstance(value, list)):
            return (
                f"[{prefix}{name}]: write [[{prefix}budgets]], with two brackets, because there may be several budgets"
            )
    return ""
