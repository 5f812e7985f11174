"""The detectors of one lane, as a policy sets them."""

from collections.abc import Callable, Mapping
from functools import partial

from runguard.core.decision import Rungs
from runguard.core.rules.agents import HandOffCycle, HandOffRounds, ReEntry, Talk
from runguard.core.rules.failures import AskedAgain, CutOff, EmptyAnswers, EqualAnswers, Stall, ToolFailures
from runguard.core.rules.limits import Context, Growth, ResultSize, Sizes
from runguard.core.rules.repetition import (
    Cycle,
    Detector,
    NearEqualCalls,
    NoNews,
    OnlyNotes,
    Polling,
    Repetition,
    Rereading,
    Reworded,
    SameAnswers,
    SameCall,
    SamePair,
)
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


class LaneRules:
    """Which detectors a lane has under one policy. Nothing about the policy is asked again when a lane begins.

    ``rungs``: other rungs than those of the policy.
    """

    def __init__(self, policy: Policy, rungs: Mapping[str, Rungs] | None = None) -> None:
        rungs = lane_rungs_of(policy) if rungs is None else rungs
        # limits that the user sets hold for answers of any length
        self.watches_orders = policy.rungs("no_news") == RULES["no_news"][0]
        self._at_top = _makers(policy, rungs, is_nested=False)
        self._nested = _makers(policy, rungs, is_nested=True)
        self._growth, self._events = rungs.get("growth"), policy.cost_baseline_events
        self._polling = rungs.get("polling")
        self._last: list[Callable[[], Detector]] = []
        if "context" in rungs:
            self._last.append(partial(Context, rungs["context"].warn))
        if policy.max_tool_result_chars:
            self._last.append(partial(ResultSize, policy.max_tool_result_chars))

    def detectors(
        self, is_polling: Callable[[str], bool], known: Sizes | None = None, place: str = ""
    ) -> list[Detector]:
        """One detector of each rule in force.

        ``known``: the prompt sizes of the session. ``place``: the name of the lane in them.
        """
        made = [make() for make in (self._nested if "@" in place else self._at_top)]
        if self._growth is not None:
            made.append(Growth(self._growth, self._events, known, place))
        if self._polling is not None:
            made.append(Polling(self._polling, is_polling))
        for make in self._last:
            made.append(make())  # noqa: PERF401 - a lane begins often, and most have one of them
        return made


def _makers(policy: Policy, rungs: Mapping[str, Rungs], *, is_nested: bool) -> list[Callable[[], Detector]]:
    """How to make the detectors that need to know nothing of their lane but whether a call opened it."""
    made: list[Callable[[], Detector]] = []
    if "repetition" in rungs:
        made.append(partial(Repetition, rungs["repetition"]))
    if "stall" in rungs:
        if rungs["stall"].nudge is not None:
            made.append(CutOff)
        made.append(partial(Stall, rungs["stall"], 0 if policy.is_explicit("stall") else FREE_RETRIES))
        made.append(partial(AskedAgain, _try_again_rungs(rungs["stall"])))
    if policy.max_identical_tool_results is not None:
        made.append(partial(EqualAnswers, policy.max_identical_tool_results))
    if "tool_failures" in rungs:
        made.append(partial(ToolFailures, rungs["tool_failures"]))
    if "no_news" in rungs:
        made.append(partial(NoNews, rungs["no_news"], patient=not policy.is_explicit("no_news")))
        if rungs["no_news"] == RULES["no_news"][0]:  # limits that the user sets hold for answers of any length
            made += [partial(Rereading, LONG_ANSWERS), partial(Reworded, REWORDED)]
            made += [SameAnswers, SamePair, OnlyNotes, NearEqualCalls]
    if "same_call" in rungs:
        made.append(partial(SameCall, rungs["same_call"], look_from=2 if policy.store != "memory" else None))
    if "empty" in rungs:
        made.append(partial(EmptyAnswers, rungs["empty"]))
    if "cycle" in rungs:
        made.append(partial(Cycle, rungs["cycle"], policy.max_cycle_len or 4))
        made.append(partial(HandOffRounds, rungs["cycle"], policy.max_cycle_len or 4))
    if "handoff" in rungs:
        # a delegate that hands its work back is called inside of itself: that goes deeper each time
        patient = not is_nested and not policy.is_explicit("handoff")
        patient = patient and rungs.get("no_news") == RULES["no_news"][0]
        made.append(partial(HandOffCycle, rungs["handoff"], patient=patient))
    if "talk" in rungs:
        made.append(partial(Talk, rungs["talk"], patient=not policy.is_explicit("talk")))
    if policy.max_reentries is not None:
        made.append(partial(ReEntry, policy.max_reentries))
    return made


def _try_again_rungs(stall: Rungs) -> Rungs:
    """Higher limits of ``stall`` also raise the limits of answers that ask to try again."""
    nudge = max(TRY_AGAIN.nudge or 0, stall.nudge or 0)
    return Rungs(nudge=nudge, stop=None if stall.stop is None else max(TRY_AGAIN.stop or 0, stall.stop))
