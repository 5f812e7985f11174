"""The detectors of one lane, as a policy sets them."""

from collections.abc import Callable, Mapping

from runguard.core.decision import Rungs
from runguard.core.detectors.asked_again import AskedAgain
from runguard.core.detectors.context import Context
from runguard.core.detectors.cut_off import CutOff
from runguard.core.detectors.cycles import Cycle
from runguard.core.detectors.detector import Detector
from runguard.core.detectors.failures import EmptyAnswers, EqualAnswers, Stall, ToolFailures
from runguard.core.detectors.growth import Growth, Sizes
from runguard.core.detectors.handoffs import HandOffCycle, HandOffRounds, ReEntry
from runguard.core.detectors.limits import ResultSize
from runguard.core.detectors.near_equal import NearEqualCalls
from runguard.core.detectors.no_news import NoNews
from runguard.core.detectors.noise import OnlyNotes, SameAnswers, SamePair
from runguard.core.detectors.polling import Polling
from runguard.core.detectors.repetition import Repetition, SameCall
from runguard.core.detectors.rereading import Rereading
from runguard.core.detectors.reworded import Reworded
from runguard.core.detectors.talk import Talk
from runguard.policy.rule_defaults import FREE_RETRIES, LONG_ANSWERS, REWORDED, RULES, TRY_AGAIN
from runguard.policy.settings import Policy


def lane_rungs_of(policy: Policy) -> dict[str, Rungs]:
    """The rungs of the rules that look at one lane, without rules that have none."""
    names = (
        "repetition",
        "no_news",
        "same_call",
        "cycle",
        "stall",
        "tool_failures",
        "empty",
        "handoff",
        "talk",
        "growth",
        "polling",
        "context",
    )
    return {name: rungs for name in names if (rungs := policy.rungs(name)) is not None and rungs != Rungs()}


def lane_detectors(
    policy: Policy,
    rungs: Mapping[str, Rungs],
    is_polling: Callable[[str], bool],
    known: Sizes | None = None,
    place: str = "",
) -> list[Detector]:
    """One detector of each rule in force.

    ``known``: the prompt sizes of the session. ``place``: the name of the lane in them.
    """
    made: list[Detector] = []
    if "repetition" in rungs:
        made.append(Repetition(rungs["repetition"]))
    if "stall" in rungs:
        if rungs["stall"].nudge is not None:
            made.append(CutOff())
        made.append(Stall(rungs["stall"], 0 if policy.is_explicit("stall") else FREE_RETRIES))
        made.append(AskedAgain(_try_again_rungs(rungs["stall"])))
    if policy.max_identical_tool_results is not None:
        made.append(EqualAnswers(policy.max_identical_tool_results))
    if "tool_failures" in rungs:
        made.append(ToolFailures(rungs["tool_failures"]))
    if "no_news" in rungs:
        made.append(NoNews(rungs["no_news"], patient=not policy.is_explicit("no_news")))
        if rungs["no_news"] == RULES["no_news"][0]:  # limits that the user sets hold for answers of any length
            made += [Rereading(LONG_ANSWERS), Reworded(REWORDED)]
            made += [SameAnswers(), SamePair(), OnlyNotes(), NearEqualCalls()]
    if "same_call" in rungs:
        made.append(SameCall(rungs["same_call"], look_from=2 if policy.store != "memory" else None))
    if "empty" in rungs:
        made.append(EmptyAnswers(rungs["empty"]))
    if "cycle" in rungs:
        made.append(Cycle(rungs["cycle"], policy.max_cycle_len or 4))
        made.append(HandOffRounds(rungs["cycle"], policy.max_cycle_len or 4))
    if "handoff" in rungs:
        # a delegate that hands its work back is called inside of itself: that goes deeper each time
        patient = "@" not in place and not policy.is_explicit("handoff")
        patient = patient and rungs.get("no_news") == RULES["no_news"][0]
        made.append(HandOffCycle(rungs["handoff"], patient=patient))
    if "talk" in rungs:
        made.append(Talk(rungs["talk"], patient=not policy.is_explicit("talk")))
    if policy.max_reentries is not None:
        made.append(ReEntry(policy.max_reentries))
    if "growth" in rungs:
        made.append(Growth(rungs["growth"], policy.cost_baseline_events, known, place))
    if "polling" in rungs:
        made.append(Polling(rungs["polling"], is_polling))
    if "context" in rungs:
        made.append(Context(rungs["context"].warn))
    if policy.max_tool_result_chars:
        made.append(ResultSize(policy.max_tool_result_chars))
    return made


def _try_again_rungs(stall: Rungs) -> Rungs:
    """Higher limits of ``stall`` also raise the limits of answers that ask to try again."""
    nudge = max(TRY_AGAIN.nudge or 0, stall.nudge or 0)
    return Rungs(nudge=nudge, stop=None if stall.stop is None else max(TRY_AGAIN.stop or 0, stall.stop))
