"""A proposal in sentences: for the table and for the comments of the file."""

from typing import TYPE_CHECKING

from runguard.calibrate.effects import Cut
from runguard.calibrate.limits import Limit
from runguard.replay.words import count, money

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Proposal


def number(limit: Limit, value: float) -> str:
    if limit.setting == "max_usd":
        return f"${value:,.2f}" if value >= 10 else f"${value:.3g}"
    return count(round(value, 1))


def recordings(many: int) -> str:
    return f"{many:,} recording{'s' * (many != 1)}"


def basis_words(made: "Proposal") -> str:
    basis, samples = made.settings.basis, made.samples
    in_all = sum(samples.recordings(label) for label in ("success", "failure", "unlabelled"))
    if not in_all:
        return "No recording could be read."
    parts = {"success": "labelled a success", "failure": "labelled a failure", "unlabelled": "without a label"}
    told = ", ".join(
        f"{samples.recordings(label):,} {words}" for label, words in parts.items() if samples.recordings(label)
    )
    text = f"{recordings(in_all)}: {told}. Limits rest on the {basis.recordings:,} {basis.kind} ones"
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


def about_cut(limit: Limit, cut: Cut) -> str:
    """What it would have cut."""
    if not cut.recordings:
        return "Would have cut nothing of what is recorded"
    by_label = ", ".join(f"{number:,} {label}" for label, number in cut.by_label.items() if number)
    if limit.setting == "max_tool_result_chars":
        told = f"Would have cut answers in {recordings(cut.recordings)} ({by_label})"
    else:
        told = (
            f"Would have stopped {recordings(cut.recordings)} ({by_label}), {count(cut.tokens)} tokens and "
            f"{money(cut.nano)} before their end"
        )
    return f"{told}. {about_successes(limit, cut)}" if cut.successes else told


def about_successes(limit: Limit, cut: Cut) -> str:
    """Which successful recordings a limit would have cut."""
    more = " and others" if cut.by_label["success"] > len(cut.successes) else ""
    return f"Successful among them: {', '.join(cut.successes)}{more}; the largest took {number(limit, limit.largest)}"


def rungs_words(rungs: dict[str, int]) -> str:
    return " ".join(f"{name} {at}" for name, at in rungs.items())
