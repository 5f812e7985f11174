"""Judge recorded runs under a policy: no harm to successful runs, no rise of cost per success, every loop caught."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runguard.gate.baseline import PAIRS_NEEDED, RUNS_NEEDED, Baseline, Change, change, interval, pairs_of
from runguard.policy.settings import Policy
from runguard.replay.batches import replay
from runguard.replay.bounded_files import MAX_UNPACKED
from runguard.replay.results import RunResult
from runguard.replay.sources import Source, open_sources
from runguard.replay.steps import Faults, UnreadableError

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_LISTED: Final = 200


@dataclass(slots=True)
class GateFinding:
    """One reason why a check failed: a run and what happened to it."""

    run: str
    message: str
    source: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"run": self.run, "source": self.source, "message": self.message}


@dataclass(slots=True)
class Check:
    """One check: its result in one sentence, and the runs that failed it."""

    name: str
    state: str
    summary: str
    findings: list[GateFinding] = field(default_factory=list)
    more: int = 0  # findings beyond those kept

    def add(self, finding: GateFinding) -> None:
        self.state = FAILED
        if len(self.findings) < _LISTED:
            self.findings.append(finding)
        else:
            self.more += 1

    @property
    def count(self) -> int:
        return len(self.findings) + self.more

    def to_dict(self) -> dict[str, Any]:
        found = [finding.to_dict() for finding in self.findings]
        return {
            "check": self.name,
            "state": self.state,
            "summary": self.summary,
            "findings": found,
            "more_findings": self.more,
        }


@dataclass(slots=True)
class GateReport:
    """The result of a gate. ``figures`` is what a new baseline would hold."""

    checks: list[Check]
    figures: Baseline
    change: Change | None = None
    sources: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(check.state != FAILED for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        figures = self.figures.to_dict()
        compared = None
        if self.change is not None:
            ratio, low, high, paired = self.change
            compared = {"ratio": round(ratio, 6), "interval": [round(low, 6), round(high, 6)], "paired": paired}
        cost = {name: figures[name] for name in ("unit", "runs", "successes", "per_success", "interval")}
        checks = [check.to_dict() for check in self.checks]
        return {"ok": self.ok, "sources": list(self.sources), "checks": checks, "cost": cost | {"change": compared}}


def gate(
    source: str,
    policy: Policy | None = None,
    *,
    loops: Sequence[str] = (),
    baseline: Baseline | None = None,
    max_rise: float = 0.0,
    assume_success: bool = False,
    model: str = "",
    workers: int = 1,
    max_unpacked: int = MAX_UNPACKED,
) -> GateReport:
    """Check the runs of ``source``, and that each run of ``loops`` is stopped. The sources are those of replay.

    ``baseline``: compare the cost per success with these figures; ``max_rise`` is the share by which it may rise.
    ``assume_success``: treat runs without a label as successful. Raise UnreadableError if there is nothing to check.
    """
    policy = policy if policy is not None else Policy.build()
    sources = open_sources(source, max_unpacked)
    harmed, figures, faults = _healthy_runs(sources, policy, assume_success, model, workers)
    checks = [harmed]
    compared = None
    if baseline is not None:
        compared, cost = _cost(figures, baseline, max_rise)
        checks.append(cost)
    if loops:
        listed = [each for place in loops for each in open_sources(place, max_unpacked)]
        checks.append(_loops(listed, policy, faults, model, workers))
    checks.append(_readable(faults))
    return GateReport(checks, figures, compared, tuple(each.name for each in sources))


def _healthy_runs(
    sources: list[Source], policy: Policy, assume_success: bool, model: str, workers: int
) -> tuple[Check, Baseline, Faults]:
    """Check that the policy stops and refuses nothing in successful runs."""
    check, figures, faults = Check("successful runs", PASSED, ""), Baseline(), Faults()
    runs = successes = 0
    for result in results_of(sources, policy, faults, model, workers):
        success = result.success is True or (assume_success and result.success is None)
        runs, successes = runs + 1, successes + success
        stop, refusal = result.first("stop"), result.first("block")
        figures.add(result, success and stop is None)
        verdict = stop or refusal
        if success and verdict is not None:
            check.add(GateFinding(result.id, f"would be {verdict} (model call {verdict.turn + 1})", result.source))
    if not runs:
        detail = f"; {faults.first[0]}" if faults.first else ""
        raise UnreadableError(
            f"{', '.join(each.name for each in sources[:5])}: contains no run that can be read{detail}"
        )
    if not successes:
        raise UnreadableError(
            f"none of the {runs} runs is labelled a success, so there is nothing to protect; label them "
            '("success": true), or pass --assume-success if the recordings are known to be good'
        )
    check.summary = (
        f"the policy would stop or refuse calls in {check.count} of {successes} successful runs"
        if check.count
        else f"the policy leaves {_all(successes, 'successful run')} alone"
    )
    return check, figures, faults


def _cost(now: Baseline, before: Baseline, max_rise: float) -> tuple[Change | None, Check]:
    """Compare the cost per success with the baseline, in the baseline's unit."""
    check, unit = Check("cost per success", PASSED, ""), before.unit
    if unit == "usd" and now.unpriced:
        check.state = FAILED
        check.summary = (
            f"unknown: {now.unpriced} model calls have no price; add prices to the policy, or pass --model for "
            "recordings that do not name their model"
        )
        return None, check
    sums, earlier = now.sums(unit), before.sums(unit)
    if not sums.successes:
        check.state, check.summary = FAILED, "no run succeeds any more"
        return None, check
    if not sums.cost or not earlier.cost:
        check.state, check.summary = SKIPPED, "the recordings contain no cost"
        return None, check
    pairs = pairs_of(now.costs(unit), before.costs(unit))
    needed, fewest = (PAIRS_NEEDED, sums.runs) if pairs else (RUNS_NEEDED, min(sums.runs, earlier.runs))
    if fewest < needed:
        check.state, check.summary = SKIPPED, f"{fewest} runs, {needed} are needed to compare them"
        return None, check
    found = change(sums, earlier, pairs)
    low, high = interval(sums)
    words = (
        f"{_amount(sums.per_success, unit)} (99 % interval {_amount(low, unit)} to {_amount(high, unit)}), "
        f"{found.ratio:.1%} of the baseline's {_amount(earlier.per_success, unit)} "
        f"({found.low:.1%} to {found.high:.1%}, {'the same runs' if found.paired else 'other runs'})"
    )
    allowed = f" and may rise by {max_rise:.0%}" if max_rise else ""
    if found.is_rise(max_rise):
        check.state, check.summary = FAILED, f"rose beyond its interval: {words}{allowed}"
    else:
        check.summary = words + allowed
    return found, check


def _loops(sources: list[Source], policy: Policy, faults: Faults, model: str, workers: int) -> Check:
    """Check that the policy stops each of the team's own loops."""
    check, caught = Check("loops", PASSED, ""), 0
    for result in results_of(sources, policy, faults, model, workers):
        if result.first("stop") is None:
            check.add(GateFinding(result.id, f"not stopped in {result.model_calls} model calls", result.source))
        elif policy.mode != "enforce":
            check.add(GateFinding(result.id, f"not stopped: the policy's mode is {policy.mode!r}", result.source))
        else:
            caught += 1
    total = caught + check.count
    if not total:
        raise UnreadableError(f"{_names(sources)}: contains no loop that can be read")
    check.summary = f"the policy stops {f'{caught} of {total} loops' if check.count else _all(total, 'loop')}"
    return check


def _readable(faults: Faults) -> Check:
    """Fail if a record cannot be read: a damaged recording must not turn into a passed check."""
    check = Check("recordings", PASSED, "every record can be read")
    if faults.count:
        check.state, check.summary = FAILED, f"{faults.count} records cannot be read"
        check.findings = [GateFinding("", line) for line in faults.first]
        check.more = faults.count - len(faults.first)
    return check


def results_of(
    sources: list[Source], policy: Policy, faults: Faults, model: str, workers: int = 1
) -> Iterable[RunResult]:
    """Every run of the sources under the policy. ``faults`` collects what cannot be read."""
    for batch in replay(sources, [policy], workers=workers, model=model):
        faults.merge(batch.faults)
        for (result,) in batch.results:
            yield result


def _names(sources: list[Source]) -> str:
    return ", ".join(each.name for each in sources[:5]) + (" and others" if len(sources) > 5 else "")


def _amount(value: float, unit: str) -> str:
    return f"${value / 1e9:.4g}" if unit == "usd" else f"{value:,.0f} tokens"


def _all(number: int, thing: str) -> str:
    return f"the only {thing}" if number == 1 else f"all {number} {thing}s"
