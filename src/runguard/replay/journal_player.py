"""The journal of a run, played to another policy:
the guard sees the very events that it saw live, lane for lane.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runguard.core.events import (
    ROOT_LANE,
    Answer,
    Event,
    ModelCall,
    ModelResult,
    Outcome,
    RunInfo,
    StateChanged,
    ToolCall,
    ToolResults,
)
from runguard.engine.calls import surplus
from runguard.engine.charges import finding_of
from runguard.reporting.journal import Entry, read_event, read_usage

if TYPE_CHECKING:
    from runguard.replay.player import Player


class JournalPlayer:
    """One journal on its way to one player."""

    def __init__(self, player: "Player") -> None:
        self._player = player
        self._asked: dict[int, ModelCall] = {}
        self._paid: set[int] = set()
        self._takes: dict[str, Callable[[Entry], None]] = {
            "start": self._start,
            "lane": self._lane,
            "lane_end": lambda entry: player.guard.close_lane(player.live, entry["l"]),
            "unspent": self._unspent,
            "back": self._back,
            "paid": self._pay,
            "surplus": self._surplus,
            "pause": self._pause,
            "resume": lambda entry: player.live.go_on(entry["t"]),
            # the measurements of earlier runs of the session
            "growth": lambda entry: player.live.growth.learn(entry["of"], player.judge.policy.cost_baseline_events),
            "tool_hold": self._tool_hold,
            "tool_paid": lambda entry: player.tool_prices.paid(player.live, entry),
            "tool_back": lambda entry: player.tool_prices.not_made(player.live, entry),
        }

    def feed(self, entry: Entry) -> None:
        self._player.tick(entry.get("t"))
        take = self._takes.get(entry["k"])
        if take is not None:
            take(entry)
            return
        event = read_event(self._player.run, entry)
        if event is not None:
            self._replay(event)

    def _start(self, entry: Entry) -> None:
        get = entry.get
        self._asked.clear()  # a run that continues starts a new journal
        self._paid.clear()
        info = RunInfo(
            self._player.run,
            str(get("app") or ""),
            str(get("user") or ""),
            str(get("session") or ""),
            self._player.run,
            entry["t"],
        )
        info.model_call_limit, info.max_usd, info.max_tokens, info.labels = (
            get("model_call_limit"),
            get("max_usd"),
            get("max_tokens"),
            get("labels"),
        )
        usd, tokens = get("ceiling") or (None, None)
        info.ceiling = usd, tokens
        self._player.begin(info)

    def _replay(self, event: Event) -> None:
        player = self._player
        if type(event) is ModelCall:
            self._asked[event.number] = event
            if player.judge.original.mode == "enforce":
                # An enforcing guard lowers the limit of the answer before it refuses; in shadow mode it checks the
                # original request.
                least = player.judge.policy.min_output_tokens
                event.max_output_tokens = min(event.max_output_tokens or least, least)
        elif type(event) is ToolCall:
            player.verdicts.called(event.lane)
            if player.verdicts.stops.is_over:
                player.tool_prices.noted(player.live, event, is_over=True)
        if player.verdicts.stops.is_over:
            return
        if isinstance(event, ToolResults):
            player.after(self._by_this_policy(event))
        elif isinstance(event, ModelResult | StateChanged):
            player.after(event)
        else:
            player.check(event)
            if isinstance(event, ModelCall):
                player.reserve(event)
            elif isinstance(event, ToolCall):
                player.tool_prices.noted(player.live, event, is_over=False)

    def _by_this_policy(self, event: ToolResults) -> ToolResults:
        """Apply the tool rules of this policy; they may differ from the recorded ones."""
        answers: list[Answer] = []
        for answer in event.answers:
            rule = self._player.guard.tool_rule(answer.tool)
            if rule is not None and rule.exempt:
                continue
            if rule is not None and (rule.polling or rule.paging):
                answer.counted = False
            answers.append(answer)
        event.answers = answers
        event.failures = any(answer.failure for answer in answers)
        event.calls = frozenset(answer.call for answer in answers if answer.counted)
        event.pairs = frozenset(
            (answer.call, answer.answer)
            for answer in answers
            if answer.counted and answer.outcome is not Outcome.REFUSED
        )
        return event

    def _pause(self, entry: Entry) -> None:
        self._player.live.paused_at = entry["t"]

    # ---- entries that are not events ---------------------------------------------------------------------------------

    def _lane(self, entry: Entry) -> None:
        live = self._player.live
        if entry["l"] not in live.lanes:
            self._player.guard.open_lane(
                live,
                entry["l"],
                str(entry.get("of") or ROOT_LANE),
                concurrent=bool(entry.get("concurrent")),
                path=tuple(entry.get("path") or ()),
                delegate=str(entry.get("agent") or ""),
            )

    def _unspent(self, entry: Entry) -> None:
        player, event = self._player, self._asked.pop(entry.get("n", 0), None)
        if player.verdicts.stops.is_over:
            return
        player.guard.unspent(player.run)
        charge = event.charge if event is not None else None
        if event is None or charge is None:
            return
        player.guard.release(charge)
        if not entry.get("denied"):
            return
        # It waited and was denied. Check whether it fits now: a store may have served others first.
        again = replace(event, charge=None)
        player.reserve(again)
        if again.charge is not None:
            possible_refusal = again.charge.possible_refusal
            player.guard.release(again.charge)
            if possible_refusal is not None:
                player.guard.found(event, finding_of(possible_refusal, event, ""))

    def _back(self, entry: Entry) -> None:
        event = self._asked.pop(entry["n"], None)
        if event is not None and event.charge is not None:
            self._player.guard.release(event.charge)

    def _tool_hold(self, entry: Entry) -> None:
        if not self._player.verdicts.stops.is_over:
            self._player.tool_prices.held(self._player.live, entry)

    def _pay(self, entry: Entry) -> None:
        number: Any = entry.get("n")
        event, usage = self._asked.get(number), read_usage(entry)
        if event is None:  # the journal mentions this call only when it was paid
            event = self._asked[number] = ModelCall(
                self._player.run, ROOT_LANE, "", self._player.clock.now, str(entry.get("model") or "")
            )
        model, estimated = str(entry.get("model") or event.model), bool(entry.get("estimated"))
        if number not in self._paid:
            self._paid.add(number)
            self._player.book(
                event, usage, model, estimated=estimated, nano=entry.get("nano"), free=bool(entry.get("free"))
            )
        elif event.charge is not None:  # reported again: the later figure replaces the earlier one
            self._player.guard.settle(
                event.charge, usage, model, nano=entry.get("nano"), estimated=estimated, free=bool(entry.get("free"))
            )

    def _surplus(self, entry: Entry) -> None:
        player, policy = self._player, self._player.judge.policy
        if player.verdicts.stops.is_over or policy.queues or entry["at_once"] <= policy.in_flight:
            return
        event = ModelCall(player.run, str(entry.get("l") or ""), str(entry.get("a") or ""), player.clock.now)
        player.guard.found(event, surplus(event, entry["at_once"], policy.in_flight))
