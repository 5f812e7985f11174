"""Opens and closes the lanes of a run: parallel branches, and agents that a model has called."""

from typing import Final

from runguard.conductor.lane_rules import LaneRules
from runguard.conductor.runs import Lane, Run, is_lasting, retired_name
from runguard.core.events import ROOT_LANE
from runguard.core.rules.failures import Stall
from runguard.policy.tools import Tools

_LANES_KEPT: Final = 4_096  # open at once in one run
_NAMES_KEPT: Final = 256  # of closed lanes
_BOOKS_KEPT: Final = 16  # of closed lanes


class LaneKeeper:
    """Keeps the lanes of every run of one guard."""

    def __init__(self, rules: LaneRules, tools: Tools) -> None:
        self.rules, self._tools = rules, tools

    def open_root(self, run: Run) -> Lane:
        """The lane in which a run begins."""
        run.lanes[ROOT_LANE] = root = self._new(run, ROOT_LANE, None, concurrent=False, path=())
        return root

    def open_lane(
        self, run: Run, key: str, parent: str, *, concurrent: bool, path: tuple[str, ...] = (), delegate: str = ""
    ) -> Lane:
        """Begin a lane: a parallel branch, or the agent ``delegate`` that a model has called.

        ``concurrent``: it runs beside its siblings, so a stop ends it alone. The failures of the last lane of this
        name carry on, and so does its stop. Its answers keep their names, but all of them are news again.
        """
        above = run.lane(parent)
        lane = self._new(run, key, above, concurrent=concurrent, path=path, delegate=delegate)
        name = retired_name(key)
        if (earlier := run.cut_off.get(name)) is not None:
            lane.stop(earlier)
        if (inherited := run.retired.get(name)) is not None:
            lane.use([*inherited, *(d for d in lane.detectors if type(d) not in {type(i) for i in inherited})])
        if not concurrent and (book := run.books.pop(name, None)) is not None:
            book.forget_pairs()
            lane.book = book
        if delegate:
            lane.follow_agent()
        if len(run.lanes) >= _LANES_KEPT:  # a run that opens so many has ended most of them without closing them
            self.close_lane(run, next(k for k in run.lanes if k != ROOT_LANE))
        run.lanes[key] = lane
        if run.journal is not None:
            called = {"agent": delegate} if delegate else {}
            run.journal.add({"k": "lane", "l": key, "of": above.key, "concurrent": concurrent, "path": path, **called})
        return lane

    def close_lane(self, run: Run, key: str) -> None:
        """End a lane. Its memory goes; its failure streaks stay for the next lane of the same name."""
        lane = run.lanes.pop(key, None)
        if lane is None:
            return
        if run.journal is not None:
            run.journal.add({"k": "lane_end", "l": key})
        name = retired_name(key)
        if lane.stopped is None:
            run.cut_off[name] = None  # one of this name ended well: no later one is refused for a sibling's sake
        elif name not in run.cut_off:
            run.cut_off[name] = lane.stopped
        if len(run.cut_off) > _NAMES_KEPT:
            run.cut_off.popitem(last=False)
        if lane.concurrent:
            return
        run.books[name] = lane.book
        if len(run.books) > _BOOKS_KEPT:
            run.books.popitem(last=False)
        run.retired[name] = [d for d in lane.detectors if isinstance(d, Stall)]
        if len(run.retired) > _NAMES_KEPT:
            run.retired.popitem(last=False)

    def _new(
        self, run: Run, key: str, parent: Lane | None, *, concurrent: bool, path: tuple[str, ...], delegate: str = ""
    ) -> Lane:
        known = run.growth.sizes if is_lasting(key) else None
        own = self.rules.detectors(self._tools.is_polling, known, key)
        made = run.detectors + own  # those of the whole run first, shared by all its lanes
        return Lane(key, parent, made, concurrent=concurrent, path=path, delegate=delegate)
