"""Other libraries behind the probes: how each is asked before a call and told after it, as its own documentation has
it.

    PYTHON-OF-THE-PEER benchmarks/peer_adapters.py NAME [REPEATS SECONDS]

Run by ``peers.py``, in an environment that has the peer and nothing of RunGuard. Where a guard wants an estimate it
gets the exact one, and rules about equal calls are put out of the way: the probes are about money. Prices are the
peers' own, for a model that all of them know.
"""

import sys
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

from peer_probes import CALL_USD, INPUT, MODEL, OUTPUT, Case, Guarded, Provider, around, run_case

NEVER = 10**9


def breakerbox(provider: Provider, cap: float) -> Guarded:
    from breakerbox import Ledger

    ledger, micro = Ledger(), round(CALL_USD * 1e6)
    ledger.open_account("run", None, round(cap * 1e6))
    return around(
        provider,
        lambda: ledger.reserve("run", micro),
        lambda held, _: ledger.reconcile(held, micro),
        lambda: ledger.spent("run") / 1e6,
    )


def agent_budget_guard(provider: Provider, cap: float) -> Guarded:
    """Its client counts a prompt with an encoding that it fetches first: the books behind it, with the exact amount."""
    from agent_budget_guard.tracking.tracker import SpendTracker

    books = SpendTracker(cap)
    return around(
        provider,
        lambda: books.check_and_reserve(CALL_USD),
        lambda held, _: books.commit(held, CALL_USD),
        books.get_spent,
    )


def agentguard47(provider: Provider, cap: float) -> Guarded:
    from agentguard import BudgetGuard

    guard = BudgetGuard(max_cost_usd=cap)
    return around(
        provider, guard.check, lambda _, __: guard.consume(INPUT + OUTPUT, 1, CALL_USD), lambda: guard.state.cost_used
    )


def agent_budget_guard_py(provider: Provider, cap: float) -> Guarded:
    from agentguard import Guard

    guard = Guard(max_usd=cap)
    return around(
        provider,
        lambda: guard.preflight(MODEL, input_tokens=INPUT, max_output_tokens=OUTPUT),
        lambda _, response: guard.record(response),
        lambda: guard.spent_usd,
    )


def budget_guard_agents(provider: Provider, cap: float) -> Guarded:
    from budgetguard import BudgetGuard, BudgetPolicy, ModelPrice, Pricing

    guard = BudgetGuard(Pricing({MODEL: ModelPrice(0.0025, 0.01)}))
    task = guard.open("run", BudgetPolicy(max_usd=cap))
    return around(
        provider,
        lambda: guard.check("run", model=MODEL, est_input_tokens=INPUT, est_output_tokens=OUTPUT),
        lambda _, __: guard.record("run", model=MODEL, input_tokens=INPUT, output_tokens=OUTPUT),
        lambda: task.usd,
    )


def guardloop(provider: Provider, cap: float) -> Guarded:
    from guardloop.budget import BudgetController
    from guardloop.models import BudgetConfig
    from guardloop.pricing import PricingCatalog

    books = BudgetController(BudgetConfig(cost_limit_usd=Decimal(str(cap))), PricingCatalog())
    return around(
        provider,
        lambda: books.check_llm_call(
            provider="openai", model=MODEL, estimated_input_tokens=INPUT, reserved_output_tokens=OUTPUT
        ),
        lambda _, __: books.record_llm_call(provider="openai", model=MODEL, input_tokens=INPUT, output_tokens=OUTPUT),
        lambda: books.cost_usd,
    )


def agent_sre(provider: Provider, cap: float) -> Guarded:
    from agent_sre.cost.guard import CostGuard

    guard = CostGuard(per_task_limit=cap, per_agent_daily_limit=cap, org_monthly_budget=0)

    def before() -> None:
        allowed, reason, _ = guard.check_and_charge("agent", "task", CALL_USD)
        if not allowed:
            raise RuntimeError(reason)

    return around(provider, before, lambda _, __: None, lambda: guard.get_budget("agent").spent_today_usd)


def pydantic_ai(provider: Provider, cap: float) -> Guarded:
    """The three checks that its agent makes around a request, on usage that is shared."""
    from pydantic_ai.usage import RequestUsage, RunUsage, UsageLimits

    limits, usage = UsageLimits(cost_limit=Decimal(str(cap)), request_limit=None), RunUsage()

    def after(_: Any, __: Any) -> None:
        usage.requests += 1
        usage.incr(RequestUsage(input_tokens=INPUT, output_tokens=OUTPUT, cost=Decimal(str(CALL_USD))))
        limits.check_tokens(usage)
        limits.check_cost(usage)

    return around(provider, lambda: limits.check_before_request(usage), after, lambda: usage.cost or 0)


def langchain(provider: Provider, cap: float) -> Guarded:
    """Counts calls, in the state of one run of its graph."""
    from langchain.agents.middleware import ModelCallLimitMiddleware

    limit, state, runtime = (
        ModelCallLimitMiddleware(run_limit=round(cap / CALL_USD), exit_behavior="error"),
        dict[str, Any](),
        None,
    )
    return around(
        provider,
        lambda: limit.before_model(state, runtime),
        lambda _, __: state.update(limit.after_model(state, runtime)),
        lambda: None,
    )


def tokenfence(provider: Provider, cap: float) -> Guarded:
    from tokenfence import async_guard, guard

    def client(create: Callable[..., Any]) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))

    plain = guard(client(provider.create), budget=cap, on_limit="raise")
    on_loop = async_guard(client(provider.acreate), budget=cap, on_limit="raise")
    return Guarded(
        lambda: plain.chat.completions.create(model=MODEL, messages=[], max_tokens=OUTPUT),
        lambda: on_loop.chat.completions.create(model=MODEL, messages=[], max_tokens=OUTPUT),
        lambda: plain.tokenfence.spent + on_loop.tokenfence.spent,  # only one of them is called
    )


def shekel(provider: Provider, cap: float) -> Guarded:
    """Patches the client's class: the provider takes the place of what is patched."""
    from openai.resources.chat import completions
    from shekel import budget

    sdk: Any = completions
    was = sdk.Completions.create, sdk.AsyncCompletions.create
    sdk.Completions.create = lambda self, **told: provider.create(**told)
    sdk.AsyncCompletions.create = lambda self, **told: provider.acreate(**told)
    open_budget = budget(max_usd=cap)
    open_budget.__enter__()

    def close() -> None:
        open_budget.__exit__(None, None, None)
        sdk.Completions.create, sdk.AsyncCompletions.create = was

    return Guarded(
        lambda: sdk.Completions.create(None, model=MODEL, messages=[], max_tokens=OUTPUT),
        lambda: sdk.AsyncCompletions.create(None, model=MODEL, messages=[], max_tokens=OUTPUT),
        lambda: open_budget.spent,
        close,
    )


def agentbudget(provider: Provider, cap: float) -> Guarded:
    from agentbudget import AgentBudget

    session = AgentBudget(cap, max_repeated_calls=NEVER).session().__enter__()
    return around(provider, lambda: None, lambda _, response: session.wrap(response), lambda: session.spent)


def agentbudget_asked(provider: Provider, cap: float) -> Guarded:
    from agentbudget import AgentBudget

    session = AgentBudget(cap, max_repeated_calls=NEVER).session().__enter__()

    def before() -> None:
        if session.would_exceed(CALL_USD):
            raise RuntimeError("would exceed")

    return around(provider, before, lambda _, response: session.wrap(response), lambda: session.spent)


def agent_watchdog(provider: Provider, cap: float) -> Guarded:
    from agent_watchdog import AgentWatchdog
    from agent_watchdog.watchdog import _estimate_cost

    watchdog = AgentWatchdog(max_budget_usd=cap, timeout_seconds=None, model="openai/gpt-4o")
    watched = watchdog.watch("run")
    watched.__enter__()
    state: Any = watchdog._current_run
    guarded = around(
        provider,
        lambda: None,
        lambda _, __: watchdog.record_tokens(INPUT, OUTPUT),
        lambda: _estimate_cost("openai/gpt-4o", state.token_in, state.token_out),
    )
    guarded.close = lambda: watched.__exit__(None, None, None)
    return guarded


CASES: dict[str, Case] = {
    made.__name__: Case(made)
    for made in (
        breakerbox,
        agent_budget_guard,
        agent_sre,
        guardloop,
        budget_guard_agents,
        agent_budget_guard_py,
        agentguard47,
        tokenfence,
        pydantic_ai,
        shekel,
        agentbudget,
        agentbudget_asked,
        agent_watchdog,
    )
}
CASES["langchain"] = Case(langchain, in_dollars=False)

if __name__ == "__main__":
    run_case(
        CASES[sys.argv[1]],
        int(sys.argv[2]) if len(sys.argv) > 2 else 21,
        float(sys.argv[3]) if len(sys.argv) > 3 else 60.0,
    )
