"""A finding as the record that outlives its run."""

import secrets
from collections.abc import Mapping
from typing import Any, Final

from runguard.conductor.runs import Lane, Run
from runguard.core.decision import Finding, Trip, text_for_operator
from runguard.core.events import Event, ModelCall, ModelResult
from runguard.core.money import to_usd
from runguard.policy.settings import Policy

# Which setting to change when a rule was too strict, for the operator's "how to resume".
_RESUME: Final = {
    "policy_error": "correct the policy file and start the process again",
    "context": (
        "the next turn begins with the same history: start a new session, compact its events, or raise "
        "max_context_tokens"
    ),
    "growth": (
        "the next turn begins with the same history: start a new session, compact its events, or raise "
        "max_event_cost_ratio"
    ),
    "guard_error": "this is a fault of RunGuard; on_guard_error='allow' lets runs go on unguarded",
}
_SETTINGS: Final = {
    "model_calls": "max_model_calls",
    "tool_calls": "max_tool_calls",
    "tool_limit": "tools.<name>.max_calls",
    "fan_out": "max_fan_out or max_concurrent_agents",
    "deadline": "max_seconds",
    "depth": "max_delegation_depth",
    "result_size": "max_tool_result_chars",
    "reentry": "max_reentries",
    "context": "max_context_tokens",
}


def trip_of(finding: Finding, run: Run, lane: Lane, event: Event, policy: Policy, advice: Mapping[str, str]) -> Trip:
    """Describes a finding; stops nothing by itself.

    ``advice``: how to go on after a stop, by rule, where the settings have other names.
    """
    enforced = policy.mode == "enforce"
    owner = lane.owner(finding) if finding.scope == "lane" else None
    info, spend = run.info, run.spend
    path = (*lane.path, event.agent) if event.agent else lane.path
    if finding.rule in ("handoff", "reentry"):
        path = (*lane.path, *finding.detail.split("→"))
    scope, scope_id = ("branch", owner.key) if owner is not None else ("run", info.run)
    run_costs, money, made = run.run_costs, finding.money, spend.model_calls - run.waiting
    if money is not None:
        scope, scope_id = money.kind, money.scope
    setting = _SETTINGS.get(finding.rule, f"rules.{finding.rule}.stop")
    return Trip(
        id=secrets.token_hex(8),
        rule=finding.rule,
        action=finding.action.word,
        scope=scope,
        scope_id=scope_id,
        unit=finding.unit,
        app=info.app,
        user_id=info.user,
        session_id=info.session,
        run_id=info.run,
        invocation_id=info.invocation,
        message=text_for_operator(
            finding,
            path=path,
            model_calls=made,
            tool_calls=spend.tool_calls,
            tokens=spend.tokens,
            spent=run.spent_text,
            enforced=enforced,
        ),
        resume=(money.resume if money is not None else "")
        or advice.get(finding.rule)
        or _RESUME.get(finding.rule)
        or f"the next user message starts with fresh counters; to allow more, raise {setting}",
        policy_digest=policy.digest,
        at=event.at,
        observed=finding.observed,
        limit=finding.limit,
        agent_path=path,
        branch=owner.key if owner is not None else None,
        tool=finding.tool or None,
        model=event.model or None if isinstance(event, ModelCall | ModelResult) else None,
        evidence=finding.evidence,
        model_calls=made,
        tool_calls=spend.tool_calls,
        tokens=spend.tokens,
        spent_usd=money.spent_usd if money is not None and money.spent_usd is not None else run_costs.spent_usd,
        reserved_usd=money.reserved_usd
        if money is not None and money.reserved_usd is not None
        else to_usd(run_costs.reserved),
        enforced=enforced,
        estimated=bool(run_costs.estimated or run_costs.unpriced),
    )


def guard_error_trip(reason: str, run_id: str, policy: Policy, at: float, **facts: Any) -> Trip:
    """A stop for the guard's own sake where it knows of no run: it could not begin."""
    return Trip(
        id=secrets.token_hex(8),
        rule="guard_error",
        action="stop",
        scope="run",
        scope_id=run_id,
        unit="errors",
        run_id=run_id,
        message=f"stopped by guard_error: {reason}",
        resume=_RESUME["guard_error"],
        policy_digest=policy.digest,
        at=at,
        observed=1,
        limit=0,
        **{"app": "", "user_id": "", "session_id": "", "invocation_id": "", "agent_path": (), **facts},
    )
