"""``assert_within_budget``: what one run may cost, as an assertion."""

import json
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from runguard.core.money import to_usd
from runguard.gate.checks import results_of
from runguard.policy.settings import Policy
from runguard.replay.results import RunResult
from runguard.replay.sources import open_sources
from runguard.replay.steps import Faults


def assert_within_budget(
    run: Any,
    *,
    usd: float | str | None = None,
    tokens: int | None = None,
    model_calls: int | None = None,
    tool_calls: int | None = None,
    policy: Policy | None = None,
    model: str = "",
) -> RunResult:
    """Assert that a run stays within these limits, and return its figures.

    ``run`` is a recording of ``runguard.testing.run``, an ADK session, a result of replay, or a path to recordings, in
    which each run must stay within the limits; the most expensive one is returned. The policy's prices are used.
    A cost that is not known fails the assertion if ``usd`` is given.
    """
    limits = {"usd": usd, "tokens": tokens, "model_calls": model_calls, "tool_calls": tool_calls}
    if all(limit is None for limit in limits.values()):
        raise ValueError("pass at least one of usd, tokens, model_calls and tool_calls")
    results = [run] if isinstance(run, RunResult) else list(_results(run, policy or Policy.build(), model))
    assert results, "the recording contains no run"
    problems = [problem for result in results for problem in _problems(result, limits)]
    assert not problems, "over budget:\n" + "\n".join(problems)
    return max(results, key=lambda result: (result.nano, result.tokens))


def _problems(result: RunResult, limits: dict[str, Any]) -> Iterator[str]:
    for name, limit in limits.items():
        if limit is None:
            continue
        if name == "usd":
            if result.unpriced:
                calls = f"{result.unpriced} of {result.model_calls} model calls"
                yield f"{result.id}: cost unknown: {calls} have no price; pass a policy with prices, or model="
            elif to_usd(result.nano) > (most := Decimal(str(limit))):
                yield f"{result.id}: ${to_usd(result.nano):f}, limit ${most:f}"
        elif getattr(result, name) > limit:
            yield f"{result.id}: {getattr(result, name):,} {name.replace('_', ' ')}, limit {limit:,}"


def _results(run: Any, policy: Policy, model: str) -> Iterator[RunResult]:
    if isinstance(run, str | Path):
        yield from _replayed(str(run), policy, model)
        return
    session = getattr(run, "session", run)
    if not hasattr(session, "model_dump"):
        raise TypeError(f"expected a recording, an ADK session, a result of replay or a path, not {type(run).__name__}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "session.json"
        file.write_text(json.dumps(session.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
        yield from _replayed(str(file), policy, model)


def _replayed(source: str, policy: Policy, model: str) -> Iterator[RunResult]:
    faults = Faults()
    yield from results_of(open_sources(source), policy, faults, model)
    assert not faults.count, f"{faults.count} records cannot be read: {faults.first[0]}"
