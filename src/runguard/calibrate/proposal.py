"""``calibrate``: propose limits from recorded runs, in two passes over the recordings.

The first pass measures the recordings, the second compares the proposal with the current policy.
``runguard calibrate`` calls ``run``; code calls ``calibrate``.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from math import ceil, floor, log10
from pathlib import Path
from textwrap import wrap
from typing import Any, Final, NamedTuple

from rich.text import Text

from runguard import console as screen
from runguard.calibrate.measure import (
    HALVES,
    LABELS,
    LEVEL,
    SECRET,
    Basis,
    Compared,
    Comparing,
    Cut,
    Figures,
    Measured,
    Measuring,
    Quantile,
    RecordingOutcome,
    changed,
    file_values,
    half_of,
    is_allowed,
    quantile,
    runs_needed,
)
from runguard.core.decision import printable
from runguard.policy.settings import Policy
from runguard.replay.output import check_place, count, money, print_faults, share, with_progress, write_file
from runguard.replay.player import PieceResult, each_run, harmless, workers_for
from runguard.replay.results import wilson
from runguard.replay.sources import Source, nothing_read, open_sources
from runguard.replay.steps import Faults

# ---- limits from the usage of runs: 2.5 times the 95th percentile, or the reason why there is no proposal

SHARE: Final = 0.95
FACTOR: Final = 2.5
_NAMES: Final = 50  # names of models in memory
_DIGITS: Final = 3  # of a proposed number, rounded up
# characters: smaller answers fit every prompt, and an error is often longer than a success
_LARGE_ANSWER: Final = 10_000


class Kind(NamedTuple):
    """A limit: its setting, the column of its figures, and the rule and unit of its verdicts."""

    setting: str
    column: str
    rule: str
    unit: str  # of its verdicts, if other limits have the same rule
    of: str
    is_whole: bool = True


KINDS: Final = (
    Kind("max_usd", "usd", "budget", "usd", "dollars", False),
    Kind("max_tokens", "tokens", "budget", "tokens", "tokens"),
    Kind("max_model_calls", "model_calls", "model_calls", "", "model calls"),
    Kind("max_tool_calls", "tool_calls", "tool_calls", "", "tool calls"),
    Kind("max_seconds", "seconds", "deadline", "", "seconds", False),
    Kind("max_tool_result_chars", "largest_answer", "result_size", "", "characters of a tool answer"),
)


@dataclass(slots=True)
class Limit:
    """A proposed limit, or why there is none."""

    kind: Kind
    recordings: int  # with a known figure
    value: float | None = None
    quantile: Quantile | None = None
    largest: float = 0.0  # the largest figure
    why_not: str = ""

    @property
    def setting(self) -> str:
        return self.kind.setting

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"value": self.value, "recordings": self.recordings, "why_not": self.why_not or None}
        found = self.quantile
        if found is None:
            return data
        interval = {"quantile": found.value, "interval": [found.low, found.high], "level": found.level}
        return data | {"share": found.share, "factor": FACTOR, **interval, "largest": self.largest}


@dataclass(slots=True)
class Missing:
    """Facts that recordings lack; without them a limit would stop healthy runs."""

    unpriced: int = 0  # recordings with calls of models that have no price
    models: dict[str, int] = field(default_factory=dict)  # the first such models, with their calls
    begins: int = 0  # recordings with times, but not for the beginning of their first run

    def add(self, measured: Measured) -> None:
        self.unpriced += bool(measured.unpriced)
        self.begins += measured.begins_untimed
        for model, calls in measured.unpriced.items():
            if model in self.models or len(self.models) < _NAMES:
                self.models[model] = self.models.get(model, 0) + calls

    def against(self, kind: Kind) -> str:
        """Return why there can be no limit of this kind, or an empty string."""
        if kind.setting == "max_usd" and self.unpriced:
            names = sorted(self.models, key=lambda model: -self.models[model])
            shown = _listed([name or "(no name: pass --model)" for name in names], 5)
            return (
                f"no price for {shown} ({self.unpriced} recordings): a dollar limit would refuse such calls; set "
                "prices in the policy"
            )
        if kind.setting == "max_seconds" and self.begins:
            return (
                f"{self.begins} recordings have times, but not when their first run began: a limit would stop them "
                "at once"
            )
        return ""


def _limit(kind: Kind, basis: Basis, missing: Missing) -> Limit:
    values, needed = basis.column(kind.column), runs_needed(SHARE)
    if why_not := missing.against(kind):
        return Limit(kind, len(values), why_not=why_not)
    found = quantile(values, SHARE)
    if len(values) < needed or found is None:
        lacking = "" if len(values) == basis.recordings else f" contain the {kind.of}"
        why_not = (
            f"{len(values)} {basis.kind} recordings{lacking}, {needed} are needed: with fewer, even the largest lies "
            f"below the true P{SHARE * 100:.0f} in more than {(1 - LEVEL) / 2:.1%} of all samples"
        )
        return Limit(kind, len(values), why_not=why_not)
    value = rounded_up(FACTOR * found.value, kind.is_whole)
    if value <= 0:
        why_not = f"{SHARE:.0%} of the recordings have none: there is no limit to derive"
    elif not is_allowed({kind.setting: value}):
        why_not = f"2.5 x P95 is {value:,g}, more than a policy allows: are the recorded {kind.of} right?"
    elif kind.setting == "max_tool_result_chars" and value < _LARGE_ANSWER:
        why_not = (
            f"2.5 x P95 is {value:,g}: answers are small, and such a low limit would hide longer ones, above all errors"
        )
    return Limit(kind, len(values), None if why_not else value, found, max(values), why_not)


def rounded_up(value: float, is_whole: bool) -> float:
    """Round up to three digits."""
    if value <= 0:
        return 0
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    if is_whole:
        step = max(step, 1.0)
    up = ceil(value / step - 1e-9) * step
    return round(up) if is_whole else float(f"{up:.{_DIGITS}g}")


# ---- effects of policies on the recordings: by label, by limit, and on the half they were not fitted to

_SHOWN: Final = 5
_SOURCES: Final = 1_000


@dataclass(slots=True)
class Share:
    """Recordings with one label under one policy."""

    recordings: int = 0
    nudged: int = 0
    refused: int = 0
    stopped: int = 0
    tokens: int = 0
    nano: int = 0

    def add(self, outcome: RecordingOutcome) -> None:
        self.recordings += 1
        for name, value in outcome._asdict().items():
            setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        counts = asdict(self)
        after = {"tokens_after": counts.pop("tokens"), "usd_after": counts.pop("nano") / 1e9}
        low, high = wilson(self.stopped, self.recordings)
        return counts | {"stopped_interval": [round(low, 4), round(high, 4)], **after}


@dataclass(slots=True)
class Effect:
    """The effect of a whole policy, by label."""

    by_label: dict[str, Share] = field(default_factory=lambda: {label: Share() for label in LABELS.values()})

    def to_dict(self) -> dict[str, Any]:
        return {label: share.to_dict() for label, share in self.by_label.items()}


@dataclass(slots=True)
class LimitEffect:
    """The effect of one limit added to the current rules: recordings that it stops, or whose answers it shortens."""

    by_label: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LABELS.values(), 0))
    tokens: int = 0  # after its stops
    nano: int = 0
    successes: list[str] = field(default_factory=list)  # the first ones
    stopped_by_source: Counter[str] = field(default_factory=Counter)  # successful ones
    by_source: Counter[str] = field(default_factory=Counter)  # all successful ones, affected or not

    def add(self, compared: Compared, cut: Cut) -> None:
        success, source = compared.success, compared.source
        if success and (source in self.by_source or len(self.by_source) < _SOURCES):
            self.by_source[source] += 1
            self.stopped_by_source[source] += cut.acted
        if not cut.acted:
            return
        self.by_label[LABELS[success]] += 1
        self.tokens += cut.tokens
        self.nano += cut.nano
        if success and len(self.successes) < _SHOWN:
            self.successes.append(compared.id)

    @property
    def apart(self) -> list[str]:
        """Sources in which it affects most successful recordings: another kind of work than the rest."""
        hit, many = self.stopped_by_source, len(self.by_source) > 1
        return [source for source, of in self.by_source.items() if many and hit[source] > 1 and 2 * hit[source] > of]

    def to_dict(self) -> dict[str, Any]:
        after = {"tokens_after": self.tokens, "usd_after": self.nano / 1e9}
        return {"apart": self.apart, "recordings": self.by_label, **after, "successful": self.successes}


@dataclass(slots=True)
class HeldOut:
    """Stops on the half of the recordings that a setting was not fitted to, both ways."""

    fitted: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # settings for which half of the runs were too few
    # recordings, stopped, stopped before
    by_label: dict[str, list[int]] = field(default_factory=lambda: {label: [0, 0, 0] for label in LABELS.values()})

    def words(self) -> str:
        label = "success" if self.by_label["success"][0] else "unlabelled"
        runs, stopped, before = self.by_label[label]
        low, high = wilson(stopped, runs)
        named = "successful" if label == "success" else "unlabelled"
        text = (
            f"of {runs} held-out {named} recordings {stopped} would have been stopped ({low:.1%} to {high:.1%}); "
            f"{before} with the present settings"
        )
        if self.missing:
            text += f". Not checked, half of the runs are too few: {', '.join(self.missing)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        names = ("recordings", "stopped", "stopped_now")
        by_label = {label: dict(zip(names, counts, strict=True)) for label, counts in self.by_label.items()}
        return {**by_label, "fitted_on_halves": self.fitted, "not_checked": self.missing}


# ---- the proposal

Watch = Callable[[str, Iterator[PieceResult]], Iterable[PieceResult]]


@dataclass(slots=True)
class Settings:
    """Fitted limits that change a policy."""

    basis: Basis
    limits: list[Limit]

    @property
    def proposed(self) -> list[Limit]:
        return [limit for limit in self.limits if limit.value is not None]

    @property
    def changes(self) -> dict[str, Any]:
        return {limit.setting: limit.value for limit in self.proposed}


@dataclass(slots=True)
class Proposal:
    """Limits from recorded runs, with their basis and their effects."""

    sources: list[str]
    policy: Policy  # the current policy, which the proposal changes
    figures: Figures = field(default_factory=Figures)
    settings: Settings = field(default_factory=lambda: Settings(Basis("", [], 0), []))
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
        return toml_of(self)

    def to_dict(self) -> dict[str, Any]:
        basis, runs = self.settings.basis, self.figures.runs
        return {
            "sources": self.sources,
            "recordings": {label: self.figures.recordings(label) for label in LABELS.values()},
            "runs": {label: sum(runs[label, half] for half in HALVES) for label in LABELS.values()},
            "basis": {"kind": basis.kind, "runs": basis.runs, "recordings": basis.recordings},
            "model_calls": self.model_calls,
            "estimated_calls": self.estimated,
            "unpriced": {"recordings": self.missing.unpriced, "calls_by_model": self.missing.models},
            "limits": {
                limit.setting: limit.to_dict()
                | ({"cut": self.cuts[limit.setting].to_dict()} if limit.setting in self.cuts else {})
                for limit in self.settings.limits
            },
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
    workers: int = 1,
    model: str = "",
    watch: Watch | None = None,
) -> Proposal:
    """Propose limits from recorded runs; raise UnreadableError if the source cannot be read.

    ``policy``: the current policy with prices, tools and rules, which the proposal changes; the defaults without it.
    ``model``: the model of recordings that do not name one.
    """
    sources = open_sources(str(source)) if isinstance(source, str | Path) else source
    policy = policy if policy is not None else Policy.validated({}, "")
    now = harmless(policy)
    workers = workers_for([now], workers)
    watch = watch or (lambda _, found: found)
    made = Proposal([each.name for each in sources], policy)
    for done in watch("measuring", each_run(sources, Measuring, (now,), workers, model)):
        made.faults.merge(done.faults)
        for measured in done.results:
            _add_measured(made, measured)

    labels = made.figures.labels_for(runs_needed(SHARE))
    made.settings, *halves = (_fitted(made, labels, part) for part in (HALVES, *((half,) for half in HALVES)))
    while made.changes:
        made.now, made.proposed = Effect(), Effect()
        made.cuts |= {limit.setting: LimitEffect() for limit in made.settings.proposed}
        fitted = [half.changes for half in halves]
        missing = [name for name in made.changes if any(name not in half for half in fitted)]
        made.held_out = HeldOut(fitted, missing)
        policies = [now, *(changed(now, changes) for changes in (made.changes, *fitted))]
        alone = [
            (changed(now, {limit.setting: limit.value}), limit.kind.rule, limit.kind.unit)
            for limit in made.settings.proposed
        ]
        for done in watch("comparing", each_run(sources, Comparing, (policies, alone), workers, model)):
            for compared in done.results:
                _add_compared(made, compared)
        if not _withhold(made, halves):
            return made
    made.now, made.proposed, made.held_out = Effect(), Effect(), HeldOut()  # no proposal is left to compare
    return made


def _fitted(made: Proposal, labels: tuple[str, ...], halves: tuple[int, ...]) -> Settings:
    basis = made.figures.basis(labels, halves)
    return Settings(basis, [_limit(kind, basis, made.missing) for kind in KINDS])


def _withhold(made: Proposal, halves: list[Settings]) -> bool:
    """Withdraw limits that would stop most work of one source: different distributions have no common P95."""
    found = [limit for limit in made.settings.proposed if made.cuts[limit.setting].apart]
    for limit in found:
        limit.why_not = (
            f"2.5 x P95 is {limit.value:,g}, but that stops most successful recordings of "
            f"{_listed(made.cuts[limit.setting].apart, 3)}: another kind of work; calibrate each source separately"
        )
        limit.value = None
        for half in halves:
            next(other for other in half.limits if other.setting == limit.setting).value = None
    return bool(found)


def _add_measured(made: Proposal, measured: Measured) -> None:
    made.figures.add(measured.success, half_of(measured.id), measured.usages, measured.result.runs)
    made.model_calls += measured.result.model_calls
    made.estimated += measured.result.estimated
    made.missing.add(measured)


def _add_compared(made: Proposal, compared: Compared) -> None:
    label = LABELS[compared.success]
    now, proposed, *fitted = compared.outcomes
    made.now.by_label[label].add(now)
    made.proposed.by_label[label].add(proposed)
    for limit, cut in zip(made.settings.proposed, compared.cuts, strict=True):
        made.cuts[limit.setting].add(compared, cut)
    held_out = fitted[1 - half_of(compared.id)]
    counts = made.held_out.by_label[label]
    made.held_out.by_label[label] = [
        before + more for before, more in zip(counts, (1, held_out.stopped, now.stopped), strict=True)
    ]


# ---- the proposal as a ``runguard.toml``: proposed settings with their reasons, then the other settings

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH: Final = 130


def toml_of(made: Proposal) -> str:
    changes = made.changes
    lines = [
        *_comment(f"Proposed by 'runguard calibrate' from {_listed(made.sources, 3)}."),
        *_comment(basis_text(made)),
    ]
    if changes:
        lines += _comment(f"Fitted on one half, counted on the other: {made.held_out.words()}.")
    if made.estimated:
        lines += _comment(
            f"Tokens of {count(made.estimated)} of {count(made.model_calls)} model calls are estimated from "
            "the length of their texts."
        )
    lines += ["# Try it on the recordings first: runguard replay SOURCE --policy THIS_FILE", ""]
    for limit in made.settings.limits:
        lines += [*_limit_lines(limit, made), ""]
    values, missing = file_values(made.policy)
    if values := {name: value for name, value in values.items() if name not in changes}:
        lines += ["# Unchanged:", *(f"{_key(name)} = {value_of(value)}" for name, value in values.items()), ""]
    if missing := [name for name in missing if name.removesuffix(" = None") not in changes]:
        lines += [*_comment(f"Not copied, because only code can express it: {', '.join(missing)}."), ""]
    if any(name in made.policy.model_fields_set for name in SECRET):
        lines += ["# store and alerts are not copied, because they may hold secrets: copy them here.", ""]
    if rules := made.policy.rules:
        lines += ["[rules]", *(f"{_key(rule)} = {value_of(rungs)}" for rule, rungs in rules.items())]
    return "\n".join(lines) + "\n"


def _limit_lines(limit: Limit, made: Proposal) -> list[str]:
    if limit.value is None or limit.quantile is None:
        return _comment(f"{limit.setting}: no proposal. {limit.why_not}.")
    text = f"{FACTOR:g} x {about_quantile(limit)}. {about_cut(limit, made.cuts[limit.setting])}."
    return [*_comment(text), f"{limit.setting} = {value_of(limit.value)}"]


def _comment(text: str) -> list[str]:
    """Return comment lines; no part of a name may become a setting."""
    return [f"# {line}" for line in wrap(printable(text), _WIDTH)]


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    """Return a TOML string. JSON escapes are valid TOML, but DEL must be escaped and surrogate pairs are invalid."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_of(value: Any) -> str:
    """Return a policy value in TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{_key(str(name))} = {value_of(entry)}" for name, entry in value.items() if entry is not None)
            + " }"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_of(entry) for entry in value if entry is not None)}]"
    return repr(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value)


def number(limit: Limit, value: float) -> str:
    if limit.setting == "max_usd":
        return f"${value:,.2f}" if value >= 10 else f"${value:.3g}"
    return count(round(value, 1))


def recordings(many: int) -> str:
    return f"{many:,} recording{'s' * (many != 1)}"


def basis_text(made: Proposal) -> str:
    basis = made.settings.basis
    by = {label: made.figures.recordings(label) for label in LABELS.values()}
    in_all = sum(by.values())
    if not in_all:
        return "No recording could be read."
    parts = {"success": "labelled a success", "failure": "labelled a failure", "unlabelled": "without a label"}
    by_label = ", ".join(f"{by[label]:,} {words}" for label, words in parts.items() if by[label])
    text = f"{recordings(in_all)}: {by_label}. Limits are based on the {basis.recordings:,} {basis.kind} ones"
    if basis.runs > basis.recordings:
        text += f" (the largest of the {basis.runs:,} runs in them, one per recording)"
    if basis.kind == "unlabelled":
        text += "; runaways among them raise the limits"
    return f"{text}."


def about_quantile(limit: Limit) -> str:
    found = limit.quantile
    assert found is not None
    low, value, high = (number(limit, each) for each in (found.low, found.value, found.high))
    return (
        f"P{found.share * 100:.0f} of {found.runs:,} recordings, {value} {limit.kind.of} ({found.level:.0%} "
        f"interval {low} to {high})"
    )


def about_cut(limit: Limit, cut: LimitEffect) -> str:
    """Describe what the limit would have stopped, and name the successful recordings among them."""
    hit = sum(cut.by_label.values())
    if not hit:
        return "Would have stopped no recording"
    by_label = ", ".join(f"{number:,} {label}" for label, number in cut.by_label.items() if number)
    if limit.setting == "max_tool_result_chars":
        text = f"Would have shortened answers in {recordings(hit)} ({by_label})"
    else:
        text = (
            f"Would have stopped {recordings(hit)} ({by_label}), {count(cut.tokens)} tokens and {money(cut.nano)} "
            "before their end"
        )
    if not cut.successes:
        return text
    more = " and others" if cut.by_label["success"] > len(cut.successes) else ""
    largest = number(limit, limit.largest)
    return f"{text}. Successful among them: {', '.join(cut.successes)}{more}; the largest took {largest}"


def _listed(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (" and others" if len(names) > most else "")


# ---- the command: print a proposal as the file that it makes, with its effects, or as JSON


def run(
    sources: list[Source],
    policy: Policy,
    *,
    target: Path | None = None,
    as_json: bool = False,
    workers: int | None = None,
    model: str = "",
) -> bool:
    """Print a proposal and return whether there is one; only then write the file.

    Raise UnreadableError if no recording can be read.
    """
    if target is not None:
        check_place(target)
    made = calibrate(
        sources,
        policy,
        workers=workers or os.cpu_count() or 1,
        model=model,
        watch=lambda _, found: with_progress(sources, found),
    )
    if not sum(made.figures.recordings(label) for label in LABELS.values()):
        raise nothing_read(sources, made.faults)
    if as_json:
        sys.stdout.write(json.dumps(made.to_dict(), indent=2) + "\n")
    else:
        _print(made)
    if made.changes and target is not None:
        write_file(target, made.to_toml())
    return bool(made.changes)


def _print(made: Proposal) -> None:
    out = screen.console()
    out.print(Text(made.to_toml()), soft_wrap=True)
    if not made.changes:
        out.print("nothing to propose from these recordings", style="yellow")
    else:
        figures = (
            *("recordings", "stopped now", "stopped then", "tokens after, now", "tokens after, then"),
            "money after, then",
        )
        shown = screen.table("", *figures, right=figures)
        for label, before in made.now.by_label.items():
            if before.recordings:
                then = made.proposed.by_label[label]
                stopped = [f"{each.stopped} ({share(each.stopped, each.recordings)})" for each in (before, then)]
                after = (count(before.tokens), count(then.tokens), money(then.nano))
                shown.add_row(label, f"{before.recordings:,}", *stopped, *after)
        out.print(screen.heading("the whole proposal"))
        screen.print_table(out, shown)
    print_faults(out, made.faults)
