"""The proposal as a ``runguard.toml``: what is proposed with where it comes from, then what the policy said before."""

import json
import re
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from runguard.calibrate.kept import SECRET, kept_of
from runguard.calibrate.limits import FACTOR, Limit
from runguard.calibrate.words import about_cut, about_quantile, basis_words, rungs_words
from runguard.replay.words import count

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Proposal

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH: Final = 130


def toml_of(made: "Proposal") -> str:
    changes = made.changes
    lines = [
        *_comment(f"Proposed by 'runguard calibrate' from {', '.join(_names(made))}."),
        *_comment(basis_words(made)),
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
    kept = kept_of(made.policy)
    if values := {name: value for name, value in kept.values.items() if name not in changes}:
        lines += ["# Kept as it was:", *(f"{_key(name)} = {value_of(value)}" for name, value in values.items()), ""]
    if missing := [name for name in kept.missing if name.removesuffix(" = None") not in changes]:
        lines += [*_comment(f"Not carried over, only code can say it: {', '.join(missing)}."), ""]
    if any(name in made.policy.model_fields_set for name in SECRET):
        lines += ["# store and alerts are not carried over, they may hold secrets: copy them here.", ""]
    lines += ["[rules]"]
    proposed = {choice.rule: choice for choice in made.settings.choices}
    for rule, choice in proposed.items():
        lines += _comment(
            f"{rule}: {'changed from' if choice.rungs else 'stays'} {rungs_words(choice.now)}. {choice.why}."
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
        return _comment(f"{limit.setting}: no advice. {limit.why_not}.")
    text = f"{FACTOR:g} x {about_quantile(limit)}. {about_cut(limit, made.cuts[limit.setting])}."
    return [*_comment(text), f"{limit.setting} = {value_of(limit.value)}"]


def _names(made: "Proposal") -> list[str]:
    return [*made.sources[:3], *([f"{len(made.sources) - 3} others"] if len(made.sources) > 3 else [])]


def _comment(text: str) -> list[str]:
    """Whatever is in a name: no line of it may become a setting."""
    return [f"# {line}" for line in wrap("".join(c if c.isprintable() else " " for c in text), _WIDTH)]


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    """What JSON escapes, TOML reads; DEL it wants escaped, and a character by two surrogates it refuses."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_of(value: Any) -> str:
    """A value of a policy in TOML, on one line."""
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
