"""``gate``: judge recorded runs under a policy, for continuous integration; ``assert_within_budget`` for one run.

Successful runs must not be harmed, the cost per success must not rise, and every known loop must be stopped.
``runguard gate`` and code call ``gate``; ``pytest_plugin`` and tests call ``assert_within_budget``.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from math import exp, inf, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from runguard.core.decision import printable
from runguard.core.errors import RunGuardError
from runguard.core.money import to_usd
from runguard.policy.settings import Policy
from runguard.replay.player import replay
from runguard.replay.results import RunResult
from runguard.replay.sources import Source, names_of, nothing_read, open_sources
from runguard.replay.steps import MAX_UNPACKED, Faults, UnreadableError

# ---- the cost per success of recorded runs, and whether it rose by more than chance explains
# It is a ratio: the cost of all runs, divided by the number of successful runs. Its logarithm is close to normal, also
# for skewed costs, and its variance follows from a few sums (the delta method). Two samples of the same runs are
# compared run by run, so that differences between runs cancel out.

LEVEL: Final = 0.99  # of the interval, two-sided: 1 of 200 comparisons of equal samples finds a rise
RUNS_NEEDED: Final = 20  # in each of two different samples; with fewer, skewed costs make the interval too narrow
PAIRS_NEEDED: Final = 5  # of the same runs

Cost = tuple[int, bool]  # of one run, in nano-USD or tokens, and whether the run succeeded


@dataclass(slots=True)
class Sums:
    """Sums over runs. ``square`` is of costs, ``with_success`` of the costs of successful runs."""

    runs: int = 0
    cost: int = 0
    successes: int = 0
    square: int = 0
    with_success: int = 0

    def add(self, cost: int, is_success: bool) -> None:
        self.runs += 1
        self.cost += cost
        self.successes += is_success
        self.square += cost * cost
        self.with_success += cost * is_success

    @property
    def per_success(self) -> float:
        return self.cost / self.successes if self.successes else inf

    def variance(self) -> float:
        """Return the variance of the logarithm of ``per_success``: from the squares of each run's relative deviation,
        ``cost / mean - success / mean``.
        """
        mean_cost, mean_success = self.cost / self.runs, self.successes / self.runs
        squares = (
            self.square / mean_cost**2
            - 2 * self.with_success / (mean_cost * mean_success)
            + self.successes / mean_success**2
        )
        return max(squares, 0.0) / (self.runs * max(self.runs - 1, 1))


class Change(NamedTuple):
    """The cost per success as a multiple of the baseline's, with its interval. 1.0: unchanged."""

    ratio: float
    low: float
    high: float
    paired: bool

    def is_rise(self, allowed: float = 0.0) -> bool:
        """Return whether the whole interval lies above the baseline plus the allowed share."""
        return self.low > (1 + allowed) * (1 + 1e-9)


def change(now: Sums, before: Sums, pairs: list[tuple[Cost, Cost]] | None = None) -> Change:
    """Compare two samples with costs and successes. ``pairs``: (now, before) of each run, if both have the same."""
    ratio = now.per_success / before.per_success
    if pairs is not None:
        runs = len(pairs)
        spread, freedom = sqrt(_pair_scatter(now, before, pairs) / (runs * max(runs - 1, 1))), max(runs - 1.0, 1.0)
    else:
        parts = [(each.variance(), each.runs) for each in (now, before)]
        total = sum(variance for variance, _ in parts)
        spread = sqrt(total)
        below = sum(variance**2 / max(runs - 1, 1) for variance, runs in parts)
        freedom = max(total**2 / below, 1.0) if below else 1.0
    return Change(ratio, *_around(ratio, spread, freedom), pairs is not None)


def interval(sums: Sums) -> tuple[float, float]:
    """Return the interval of a sample's cost per success."""
    return _around(sums.per_success, sqrt(sums.variance()), max(sums.runs - 1, 1))


def _around(value: float, spread: float, freedom: float) -> tuple[float, float]:
    reach = exp(min(_student(1 - (1 - LEVEL) / 2, freedom) * spread, 700.0))
    return value / reach, value * reach


def pairs_of(now: Mapping[str, Cost], before: Mapping[str, Cost]) -> list[tuple[Cost, Cost]] | None:
    """Return the costs of each run in both samples; None if the samples consist of different runs."""
    if not now or now.keys() != before.keys():
        return None
    return [(cost, before[name]) for name, cost in now.items()]


def _pair_scatter(now: Sums, before: Sums, pairs: list[tuple[Cost, Cost]]) -> float:
    means = [(each.cost / each.runs, each.successes / each.runs) for each in (now, before)]
    total = 0.0
    for pair in pairs:
        first, second = (
            cost / mean_cost - is_success / mean_success
            for (cost, is_success), (mean_cost, mean_success) in zip(pair, means, strict=True)
        )
        total += (first - second) ** 2
    return total


def _student(share: float, freedom: float) -> float:
    """Return a quantile of Student's distribution: the normal quantile with the first terms of its expansion."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum((term / freedom**power for power, term in enumerate(terms, 1)), 0.0)


# ---- the baseline: the figures of one gate, kept for later ones

FORMAT: Final = 1
_RUNS_LISTED: Final = 10_000  # runs whose figures are kept one by one
_UNITS: Final = ("usd", "tokens")


class BaselineError(RunGuardError):
    """A baseline file cannot be used; the message says why."""


@dataclass(slots=True)
class Baseline:
    """Sums in both units, and the figures of each run while there are few.

    A run counts with what it spends up to the stop that the policy would make.
    """

    usd: Sums = field(default_factory=Sums)  # in nano-USD
    tokens: Sums = field(default_factory=Sums)
    unpriced: int = 0  # model calls without a price
    listed: dict[str, tuple[int, int, bool]] | None = field(default_factory=dict)  # id: nano-USD, tokens, success

    def add(self, run: RunResult, is_success: bool) -> None:
        """Add a run; ``is_success`` is false for a run that the policy would have stopped."""
        nano, tokens = run.nano - run.saved.nano, run.tokens - run.saved.tokens
        self.usd.add(nano, is_success)
        self.tokens.add(tokens, is_success)
        self.unpriced += run.unpriced
        if self.listed is not None:
            if run.id in self.listed or len(self.listed) >= _RUNS_LISTED:
                self.listed = None  # too many, or ids that name no run: compare sums only
            else:
                self.listed[run.id] = (nano, tokens, is_success)

    @property
    def unit(self) -> str:
        """The unit to compare: dollars, unless a call has no price or nothing has a cost."""
        return "tokens" if self.unpriced or not self.usd.cost else "usd"

    def sums(self, unit: str) -> Sums:
        return self.usd if unit == "usd" else self.tokens

    def costs(self, unit: str) -> Mapping[str, Cost]:
        """Return the cost of each run by its id; empty if they are not kept."""
        place = _UNITS.index(unit)
        return {name: (figures[place], figures[2]) for name, figures in (self.listed or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        sums = self.sums(self.unit)
        low, high = interval(sums) if sums.cost and sums.successes else (None, None)
        return {
            "runguard_gate": FORMAT,
            "unit": self.unit,
            "runs": sums.runs,
            "successes": sums.successes,
            "per_success": _shown(sums.per_success if sums.successes else None, self.unit),
            "interval": [_shown(low, self.unit), _shown(high, self.unit)],
            "sums": {"usd": asdict(self.usd), "tokens": asdict(self.tokens), "unpriced": self.unpriced},
            "listed": self.listed and {name: list(figures) for name, figures in sorted(self.listed.items())},
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """Read a file of ``to_json``; raise BaselineError for anything else."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BaselineError(f"{path}: no such file; create it with --update-baseline") from None
        except (OSError, ValueError) as error:
            raise BaselineError(f"{path}: cannot be read: {error}") from None
        try:
            if data["runguard_gate"] != FORMAT:
                raise BaselineError(
                    f"{path}: format {data['runguard_gate']!r}, this version reads {FORMAT}; "
                    "create it again with --update-baseline"
                )
            sums, listed = data["sums"], data["listed"]
            usd, tokens = (Sums(**{name: _whole(value) for name, value in sums[unit].items()}) for unit in _UNITS)
            found = cls(usd, tokens, _whole(sums["unpriced"]), None)
            if listed is not None:
                found.listed = {name: (_whole(n), _whole(taken), bool(ok)) for name, (n, taken, ok) in listed.items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BaselineError(f"{path}: not a baseline of runguard gate; create it with --update-baseline") from None
        if not found.sums(found.unit).successes:
            raise BaselineError(f"{path}: contains no successful run; create it again with --update-baseline")
        return found


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _shown(value: float | None, unit: str) -> float | None:
    """Return a readable figure: dollars to six digits, or whole tokens."""
    if value is None:
        return None
    return float(f"{value / 1e9:.6g}") if unit == "usd" else float(round(value))


# ---- the gate

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_LISTED: Final = 200


@dataclass(slots=True)
class GateFinding:
    """One reason why a check failed: a run and what happened to it."""

    run: str
    message: str
    source: str = ""


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
        data = asdict(self)
        return {"check": data.pop("name"), "more_findings": data.pop("more"), **data}


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
    ``assume_success``: treat runs without a label as successful, except those that RunGuard stopped. Raise
    UnreadableError if there is nothing to check.
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
    runs = successes = stopped = 0
    for result in results_of(sources, policy, faults, model, workers):
        is_assumed = assume_success and result.success is None
        success = result.success is True or (is_assumed and not result.was_stopped)
        runs, successes, stopped = runs + 1, successes + success, stopped + (is_assumed and result.was_stopped)
        stop, refusal = result.first("stop"), result.first("block")
        figures.add(result, success and stop is None)
        verdict = stop or refusal
        if success and verdict is not None:
            check.add(GateFinding(result.id, f"would be {verdict} (model call {verdict.turn + 1})", result.source))
    if not runs:
        raise nothing_read(sources, faults)
    if not successes:
        if stopped:
            others = ", and the others are labelled failures" if stopped < runs else ""
            raise UnreadableError(
                f"RunGuard stopped {stopped} of the {runs} runs{others}, so there is nothing to protect; record runs "
                "that went well"
            )
        raise UnreadableError(
            f"none of the {runs} runs is labelled a success, so there is nothing to protect; label them "
            '("success": true), or pass --assume-success if the recordings are known to be good'
        )
    check.summary = (
        f"the policy would stop or refuse calls in {check.count} of {successes} successful runs"
        if check.count
        else f"the policy leaves {_all(successes, 'successful run')} alone"
    )
    if stopped:
        check.summary += f"; not assumed successful, because RunGuard stopped them: {stopped}"
    return check, figures, faults


def _cost(now: Baseline, before: Baseline, max_rise: float) -> tuple[Change | None, Check]:
    """Compare the cost per success with the baseline, in the baseline's unit."""
    unit = before.unit
    sums, earlier = now.sums(unit), before.sums(unit)
    if unit == "usd" and now.unpriced:
        return None, _cost_check(
            FAILED,
            f"unknown: {now.unpriced} model calls have no price; add prices to the policy, or pass --model for "
            "recordings that do not name their model",
        )
    if not sums.successes:
        return None, _cost_check(FAILED, "no run succeeds any more")
    if not sums.cost or not earlier.cost:
        return None, _cost_check(SKIPPED, "the recordings contain no cost")
    pairs = pairs_of(now.costs(unit), before.costs(unit))
    needed, fewest = (PAIRS_NEEDED, sums.runs) if pairs else (RUNS_NEEDED, min(sums.runs, earlier.runs))
    if fewest < needed:
        return None, _cost_check(SKIPPED, f"{fewest} runs, {needed} are needed to compare them")
    found = change(sums, earlier, pairs)
    low, high = interval(sums)
    words = (
        f"{_amount(sums.per_success, unit)} (99 % interval {_amount(low, unit)} to {_amount(high, unit)}), "
        f"{found.ratio:.1%} of the baseline's {_amount(earlier.per_success, unit)} "
        f"({found.low:.1%} to {found.high:.1%}, {'the same runs' if found.paired else 'other runs'})"
    ) + (f" and may rise by {max_rise:.0%}" if max_rise else "")
    if found.is_rise(max_rise):
        return found, _cost_check(FAILED, f"rose beyond its interval: {words}")
    return found, _cost_check(PASSED, words)


def _cost_check(state: str, summary: str) -> Check:
    return Check("cost per success", state, summary)


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
        raise UnreadableError(f"{names_of(sources)}: contains no loop that can be read")
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


def _amount(value: float, unit: str) -> str:
    return f"${value / 1e9:.4g}" if unit == "usd" else f"{value:,.0f} tokens"


def _all(number: int, thing: str) -> str:
    return f"the only {thing}" if number == 1 else f"all {number} {thing}s"


# ---- the result for people and programs: text, Markdown for a pull request, JUnit for a CI server

_COLOURS: Final = {"passed": "green", "failed": "red", "skipped": "yellow"}
_SHOWN: Final = 20


def print_report(out: Console, report: GateReport) -> None:
    for check in report.checks:
        out.print(
            Text.assemble((f"{check.state:<8}", _COLOURS[check.state]), f"{check.name}: {printable(check.summary)}"),
            soft_wrap=True,
        )
        for line in _lines(check, _SHOWN):
            out.print(Text(f"          {line}"), soft_wrap=True)


def markdown(report: GateReport) -> str:
    """Return a table of the checks, and a list of findings."""
    lines = [
        f"### runguard gate: {'passed' if report.ok else 'failed'}",
        "",
        "| check | result | |",
        "|---|---|---|",
        *(f"| {check.name} | {check.state} | {_cell(check.summary)} |" for check in report.checks),
    ]
    for check in report.checks:
        if check.findings:
            lines += ["", f"**{check.name}**", "", *(f"- {_cell(line)}" for line in _lines(check, _SHOWN))]
    return "\n".join(lines) + "\n"


def junit(report: GateReport) -> str:
    """Return JUnit XML: one test case for each check, and one for each run that failed it."""
    suite = ElementTree.Element("testsuite", name="runguard gate")

    def case(group: str, name: str) -> ElementTree.Element:
        return ElementTree.SubElement(suite, "testcase", classname=group, name=_xml(name), time="0")

    for check in report.checks:
        element = case("runguard.gate", check.name)
        if check.state == FAILED:
            failure = ElementTree.SubElement(element, "failure", message=_xml(check.summary))
            failure.text = _xml("\n".join(_lines(check, len(check.findings))))
        elif check.state == SKIPPED:
            ElementTree.SubElement(element, "skipped", message=_xml(check.summary))
        else:
            ElementTree.SubElement(element, "system-out").text = _xml(check.summary)
        for finding in check.findings:
            if finding.run:
                element = case(f"runguard.gate.{check.name.replace(' ', '_')}", finding.run)
                ElementTree.SubElement(element, "failure", message=_xml(finding.message))
    for total, kind in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(total, str(sum(1 for _ in suite.iter(kind))))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _lines(check: Check, most: int) -> list[str]:
    lines = [
        printable(f"{finding.run}: {finding.message}" if finding.run else finding.message)
        for finding in check.findings[:most]
    ]
    hidden = check.count - len(lines)
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def _cell(text: str) -> str:
    """Return text for a table or a list of Markdown: on one line, with nothing that renders as markup."""
    line = " ".join(printable(text).split())
    for mark in "\\`*_[]<>|":
        line = line.replace(mark, f"\\{mark}")
    return line


def _xml(text: str) -> str:
    """Return text without control characters and lone surrogates, which XML cannot hold."""
    clean = "".join(each if each in "\n\t" or each >= " " else " " for each in text)
    return clean.encode("utf-8", "replace").decode().replace("\ufffe", "?").replace("\uffff", "?")


# ---- what one run may cost, as an assertion


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
