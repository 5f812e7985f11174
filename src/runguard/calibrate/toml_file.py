"""The proposal as a ``runguard.toml``: proposed settings with their reasons, then the other settings of the policy."""

import json
import re
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from runguard.calibrate.effects import LimitEffect
from runguard.calibrate.policy_values import SECRET, file_values
from runguard.calibrate.proposed_limits import FACTOR, Limit
from runguard.replay.formatting import count, money

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Proposal

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH: Final = 130


def toml_of(made: "Proposal") -> str:
    changes = made.changes
    lines = [
        *_comment(f"Proposed by 'runguard calibrate' from {', '.join(_names(made))}."),
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
        lines += [*_limit(limit, made), ""]
    values, missing = file_values(made.policy)
    if values := {name: value for name, value in values.items() if name not in changes}:
        lines += ["# Unchanged:", *(f"{_key(name)} = {value_of(value)}" for name, value in values.items()), ""]
    if missing := [name for name in missing if name.removesuffix(" = None") not in changes]:
        lines += [*_comment(f"Not copied, because only code can express it: {', '.join(missing)}."), ""]
    if any(name in made.policy.model_fields_set for name in SECRET):
        lines += ["# store and alerts are not copied, because they may hold secrets: copy them here.", ""]
    lines += ["[rules]"]
    proposed = {choice.rule: choice for choice in made.settings.choices}
    for rule, choice in proposed.items():
        lines += _comment(
            f"{rule}: {'changed from' if choice.rungs else 'stays'} {rungs_text(choice.now)}. {choice.why}."
        )
        if choice.rungs is not None:
            lines.append(f"{rule} = {value_of(choice.rungs)}")
    lines += [
        f"{_key(rule)} = {value_of(rungs)}"
        for rule, rungs in made.policy.rules.items()
        if rule not in changes.get("rules", {})
    ]
    return "\n".join(lines) + "\n"


def _limit(limit: Limit, made: "Proposal") -> list[str]:
    if limit.value is None or limit.quantile is None:
        return _comment(f"{limit.setting}: no proposal. {limit.why_not}.")
    text = f"{FACTOR:g} x {about_quantile(limit)}. {about_cut(limit, made.cuts[limit.setting])}."
    return [*_comment(text), f"{limit.setting} = {value_of(limit.value)}"]


def _names(made: "Proposal") -> list[str]:
    return [*made.sources[:3], *([f"{len(made.sources) - 3} others"] if len(made.sources) > 3 else [])]


def _comment(text: str) -> list[str]:
    """Return comment lines; no part of a name may become a setting."""
    return [f"# {line}" for line in wrap("".join(c if c.isprintable() else " " for c in text), _WIDTH)]


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


def basis_text(made: "Proposal") -> str:
    basis, samples = made.settings.basis, made.samples
    in_all = sum(samples.recordings(label) for label in ("success", "failure", "unlabelled"))
    if not in_all:
        return "No recording could be read."
    parts = {"success": "labelled a success", "failure": "labelled a failure", "unlabelled": "without a label"}
    by_label = ", ".join(
        f"{samples.recordings(label):,} {words}" for label, words in parts.items() if samples.recordings(label)
    )
    text = f"{recordings(in_all)}: {by_label}. Limits are based on the {basis.recordings:,} {basis.kind} ones"
    if basis.runs > basis.recordings:
        text += f" (the largest of the {basis.runs:,} runs in them, one per recording)"
    if basis.is_sampled:
        text += ", on a uniform sample of them"
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
    """Describe what the limit would have stopped."""
    if not cut.recordings:
        return "Would have stopped no recording"
    by_label = ", ".join(f"{number:,} {label}" for label, number in cut.by_label.items() if number)
    if limit.setting == "max_tool_result_chars":
        text = f"Would have shortened answers in {recordings(cut.recordings)} ({by_label})"
    else:
        text = (
            f"Would have stopped {recordings(cut.recordings)} ({by_label}), {count(cut.tokens)} tokens and "
            f"{money(cut.nano)} before their end"
        )
    return f"{text}. {about_successes(limit, cut)}" if cut.successes else text


def about_successes(limit: Limit, cut: LimitEffect) -> str:
    """Name the successful recordings that a limit would have affected."""
    more = " and others" if cut.by_label["success"] > len(cut.successes) else ""
    return f"Successful among them: {', '.join(cut.successes)}{more}; the largest took {number(limit, limit.largest)}"


def rungs_text(rungs: dict[str, int]) -> str:
    return " ".join(f"{name} {at}" for name, at in rungs.items())
