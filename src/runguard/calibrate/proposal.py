"""Make a proposal in two passes over the recordings: measure and try settings, then compare the proposal with now."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runguard.calibrate.effects import Effect, HeldOut, LimitEffect
from runguard.calibrate.measuring import Compared, Comparing, Comparison, Measured, Measuring, Variant, scaled, variants
from runguard.calibrate.policy_values import changed
from runguard.calibrate.proposed_limits import SHARE, Limit, Missing, propose
from runguard.calibrate.rungs import Choice, Curve, choose
from runguard.calibrate.samples import HALVES, LABELS, Basis, Samples, half_of, runs_needed
from runguard.policy.settings import Policy
from runguard.replay.batches import PieceResult, each_run, workers_for
from runguard.replay.engine import harmless
from runguard.replay.sources import Source, open_sources
from runguard.replay.steps import Faults

Watch = Callable[[str, Iterator[PieceResult]], Iterable[PieceResult]]


@dataclass(slots=True)
class Settings:
    """Fitted limits and rungs that change a policy."""

    basis: Basis
    limits: list[Limit]
    choices: list[Choice]

    @property
    def proposed(self) -> list[Limit]:
        return [limit for limit in self.limits if limit.value is not None]

    @property
    def changes(self) -> dict[str, Any]:
        found: dict[str, Any] = {limit.setting: limit.value for limit in self.proposed}
        rules = {choice.rule: choice.rungs for choice in self.choices if choice.rungs is not None}
        return found | ({"rules": rules} if rules else {})

    def over(self, policy: Policy) -> Policy:
        return changed(policy, self.changes)


@dataclass(slots=True)
class Proposal:
    """Limits and rungs from recorded runs, with their basis and their effects."""

    sources: list[str]
    policy: Policy  # the current policy, which the proposal changes
    samples: Samples
    settings: Settings
    model_calls: int = 0
    estimated: int = 0
    missing: Missing = field(default_factory=Missing)
    faults: Faults = field(default_factory=Faults)
    now: Effect = field(default_factory=Effect)
    proposed: Effect = field(default_factory=Effect)
    cuts: dict[str, LimitEffect] = field(default_factory=dict)  # by setting
    held_out: HeldOut = field(default_factory=HeldOut)

    @property
    def changes(self) -> dict[str, Any]:
        """The proposed settings, as a policy file names them."""
        return self.settings.changes

    def to_toml(self) -> str:
        from runguard.calibrate.toml_file import toml_of

        return toml_of(self)

    def to_dict(self) -> dict[str, Any]:
        basis, samples = self.settings.basis, self.samples
        return {
            "sources": self.sources,
            "recordings": {label: samples.recordings(label) for label in LABELS.values()},
            "runs": {label: samples.runs(label) for label in LABELS.values()},
            "basis": {
                "kind": basis.kind,
                "runs": basis.runs,
                "recordings": basis.recordings,
                "is_sampled": basis.is_sampled,
            },
            "model_calls": self.model_calls,
            "estimated_calls": self.estimated,
            "unpriced": {"recordings": self.missing.unpriced, "calls_by_model": self.missing.models},
            "limits": {
                limit.setting: limit.to_dict()
                | ({"cut": self.cuts[limit.setting].to_dict()} if limit.setting in self.cuts else {})
                for limit in self.settings.limits
            },
            "rules": {choice.rule: choice.to_dict() for choice in self.settings.choices},
            "proposal": self.changes,
            "now": self.now.to_dict(),
            "proposed": self.proposed.to_dict(),
            "held_out": self.held_out.to_dict(),
            "skipped": {"count": self.faults.count, "first": self.faults.first},
            "toml": self.to_toml(),
        }


def calibrate(
    source: str | Path | list[Source],
    policy: Policy | None = None,
    *,
    max_false_stops: float = 0,
    workers: int = 1,
    model: str = "",
    watch: Watch | None = None,
) -> Proposal:
    """Propose limits from recorded runs; raise UnreadableError if the source cannot be read.

    ``policy``: the current policy with prices, tools and rules, which the proposal changes; the defaults without it.
    ``max_false_stops``: how many successful runs a rule may stop: a number, or below 1 a share. ``model``: the model of
    recordings that do not name one.
    """
    sources = open_sources(str(source)) if isinstance(source, str | Path) else source
    policy = policy if policy is not None else Policy.validated({}, "")
    now = harmless(policy)
    workers = workers_for([now], workers)
    watch = watch or (lambda _, found: found)
    tried = variants(policy)
    curves = _curves(policy, tried)
    made = Proposal([each.name for each in sources], policy, Samples(), Settings(Basis("", [], HALVES), [], []))
    for done in watch("measuring", each_run(sources, Measuring, (now, tried), workers, model)):
        made.faults.merge(done.faults)
        for measured in done.results:
            _count(made, curves, tried, measured)

    def fitted(halves: tuple[int, ...]) -> Settings:
        needed = runs_needed(SHARE)
        basis = made.samples.basis(needed, halves)
        return Settings(
            basis, propose(basis, made.missing), [choose(curve, halves, max_false_stops) for curve in curves]
        )

    made.settings = fitted(HALVES)
    parts = [fitted((half,)) for half in HALVES]
    while made.changes:
        made.now, made.proposed, made.held_out = (
            Effect(),
            Effect(),
            HeldOut.of([part.changes for part in parts], made.changes),
        )
        comparisons = _comparisons(made, parts, now)
        for done in watch("comparing", each_run(sources, Comparing, (comparisons,), workers, model)):
            for compared in done.results:
                _compare(made, compared)
        if not _withhold(made, parts):
            return made
    made.now, made.proposed, made.held_out = Effect(), Effect(), HeldOut()  # no proposal is left to compare
    return made


def _comparisons(made: Proposal, parts: list[Settings], now: Policy) -> list[Comparison]:
    """Return the current policy, the proposal, each limit alone, and the fit of each half for the other half."""
    made.cuts |= {limit.setting: LimitEffect() for limit in made.settings.proposed}
    alone = [
        Comparison(changed(now, {limit.setting: limit.value}), limit.kind.rule, limit.kind.unit)
        for limit in made.settings.proposed
    ]
    halves = [Comparison(part.over(now), half=1 - half) for half, part in zip(HALVES, parts, strict=True)]
    return [Comparison(now), Comparison(made.settings.over(now)), *alone, *halves]


def _withhold(made: Proposal, parts: list[Settings]) -> bool:
    """Withdraw limits that would stop most work of one source: different distributions have no common P95."""
    found = [limit for limit in made.settings.proposed if made.cuts[limit.setting].apart]
    for limit in found:
        limit.withhold(made.cuts[limit.setting].apart)
        for part in parts:
            for other in part.limits:
                if other.setting == limit.setting:
                    other.value = None
    return bool(found)


def _curves(policy: Policy, tried: list[Variant]) -> list[Curve]:
    found = []
    for rule in dict.fromkeys(variant.rule for variant in tried):
        rungs = policy.rungs(rule)
        assert rungs is not None
        found.append(
            Curve(
                rule,
                scaled(rungs, 1.0),
                [variant for variant in tried if variant.rule == rule and variant.rungs is not None],
            )
        )
    return found


def _count(made: Proposal, curves: list[Curve], tried: list[Variant], measured: Measured) -> None:
    half = half_of(measured.id)
    made.samples.add(measured.success, half, measured.usages, measured.runs)
    made.model_calls += measured.model_calls
    made.estimated += measured.estimated
    made.missing.add(measured.unpriced, measured.begins_untimed)
    now = measured.now
    for curve in curves:
        mine = [
            (variant, measured.tried.get(number, now))
            for number, variant in enumerate(tried)
            if variant.rule == curve.rule
        ]
        off = next(outcome for variant, outcome in mine if variant.rungs is None)
        curve.add(
            measured.success,
            half,
            measured.tokens,
            now,
            off,
            [outcome for variant, outcome in mine if variant.rungs is not None],
        )


def _compare(made: Proposal, compared: Compared) -> None:
    now, proposed, *rest = compared.outcomes
    assert now is not None
    assert proposed is not None
    made.now.add(compared.success, now)
    made.proposed.add(compared.success, proposed)
    limits = made.settings.proposed
    for limit, outcome in zip(limits, rest, strict=False):
        assert outcome is not None
        made.cuts[limit.setting].add(compared.id, compared.source, compared.success, outcome)
    held_out = next(outcome for outcome in rest[len(limits) :] if outcome is not None)
    made.held_out.add(compared.success, now, held_out)
