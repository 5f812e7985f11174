"""Who passes the work to whom: circles of hand-offs, and delegation that goes ever deeper."""

import json
from collections import Counter, deque
from typing import ClassVar

from runguard.core.decision import HANDOFF_ROUNDS, Action, Finding, Rungs
from runguard.core.detectors.cycles import Rounds
from runguard.core.events import AgentEntered, HandOff, ModelCall, ToolCall, ToolResults

_PATH_SHOWN = 12
_CHAIN_KEPT = 256


class HandOffCycle:
    """The same hand-off edge again and again with nothing new between.

    One return to the parent is normal and not seen. A ``patient`` detector leaves out hand-offs between which a tool
    was asked: ``Orders`` counts those.
    """

    sees: ClassVar[tuple[type, ...]] = (HandOff, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_answers", "_edges", "_path", "_patient", "_seen", "record", "rungs")

    def __init__(self, rungs: Rungs, *, patient: bool = False) -> None:
        self.rungs, self._patient = rungs, patient
        self._answers = 0  # of tools since a hand-off was made
        self._seen: dict[tuple[str, str], int] = {}  # edge -> answers so far when it was last used
        self.record = self._edges = Counter[tuple[str, str]]()
        self._path: deque[str] = deque(maxlen=_PATH_SHOWN)

    def observe(self, event: HandOff | ToolResults) -> Finding | None:
        if not isinstance(event, HandOff):
            if event.progress and self._edges:
                self._edges.clear()
                self._path.clear()
                self._seen.clear()
            if self._patient and self._edges:
                for answer in event.answers:
                    if answer.counted and not answer.hands_over:
                        self._answers += 1
                        break
            return None
        if not self._path or self._path[-1] != event.agent:
            self._path.append(event.agent)
        edge = (event.agent, event.target)
        self._edges[edge] += self._seen.get(edge, self._answers) == self._answers
        self._seen[edge] = self._answers
        count = self._edges[edge]
        path = "→".join(self._path)
        self._path.append(event.target)
        if len(self._edges) > 256:  # so many different edges are no circle
            self._edges.clear()
            self._seen.clear()
        reached = self.rungs.at(count)
        if reached is None:
            return None
        return Finding(
            "handoff",
            reached[0],
            count,
            reached[1],
            "equal hand-offs without news",
            "lane",
            "",
            "↔".join(sorted((event.agent, event.target))),
            path,
        )


class HandOffRounds:
    """Full rounds of a circle of at most ``max_len`` hand-offs with nothing new between.

    Off unless ``cycle_repeats`` is set.
    """

    sees: ClassVar[tuple[type, ...]] = (HandOff, ToolResults)
    __slots__ = ("_rounds", "rungs")

    def __init__(self, rungs: Rungs, max_len: int = 4) -> None:
        self.rungs, self._rounds = rungs, Rounds(max_len)

    def observe(self, event: HandOff | ToolResults) -> Finding | None:
        if not isinstance(event, HandOff):
            if event.progress:
                self._rounds.clear()
            return None
        rounds, agents = self._rounds.add((event.agent, event.target), event.agent)
        reached = self.rungs.at(rounds)
        if reached is None or rounds < 2:
            return None
        evidence = ({"event": "", "pattern": json.dumps(agents)},)
        key = "↔".join(sorted(set(agents)))
        return Finding(
            "cycle",
            reached[0],
            rounds,
            reached[1],
            HANDOFF_ROUNDS,
            "lane",
            "",
            key,
            "→".join([*agents, event.target]),
            evidence,
        )


class ReEntry:
    """Hand-offs back to an agent that is already in the chain of hand-offs: A→B→A is the first re-entry.

    The chain starts again where a container (a loop, a sequence) starts an agent. A container that gets a hand-off
    and starts an agent before any model is asked passes the work on: the chain goes on.
    """

    sees: ClassVar[tuple[type, ...]] = (HandOff, AgentEntered, ModelCall)
    __slots__ = ("_at", "_chain", "_count", "_handed", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._chain: dict[str, None] = {}
        self._at = ""  # the agent at work
        self._handed = False  # a hand-off was made, and no model was asked since
        self._count = 0

    def observe(self, event: HandOff | AgentEntered | ModelCall) -> Finding | None:
        if isinstance(event, ModelCall):
            self._handed = False
            return None
        if isinstance(event, AgentEntered):
            if event.agent != self._at:
                self._enter(event.agent)
            return None
        if event.agent not in self._chain:
            self._enter(event.agent)
        self._at, self._handed = event.target, True
        if event.target not in self._chain:
            self._add(event.target)
            return None
        self._count += 1
        if self._count < self.limit:
            return None
        path = "→".join([*list(self._chain)[-_PATH_SHOWN:], event.target])
        return Finding("reentry", Action.STOP, self._count, self.limit, "re-entries", "lane", "", event.target, path)

    def _enter(self, agent: str) -> None:
        if not self._handed:
            self._chain.clear()
            self._count = 0
        self._add(agent)
        self._at = agent

    def _add(self, agent: str) -> None:
        self._chain[agent] = None
        if len(self._chain) > _CHAIN_KEPT:
            del self._chain[next(iter(self._chain))]


class Depth:
    """Delegations made by a model, one inside the other. Containers do not count.

    The callee is refused and the caller goes on. A task cannot be refused like that, because its caller would wait
    for ever: it stops.
    """

    sees: ClassVar[tuple[type, ...]] = (AgentEntered, ToolCall)
    rests: ClassVar[tuple[type, ...]] = (ToolCall,)
    record: ClassVar[tuple[()]] = ()
    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def observe(self, event: AgentEntered | ToolCall) -> Finding | None:
        if event.depth <= self.limit:
            return None
        about = (event.depth, self.limit, "nested delegations")
        key = f"{event.agent}:{event.depth}"
        if isinstance(event, ToolCall):
            return Finding("depth", Action.BLOCK, *about, "call", event.tool, key, f"from {event.agent}")
        if event.is_task:
            return Finding("depth", Action.STOP, *about, "lane", "", key, f"agent {event.agent}")
        return Finding("depth", Action.BLOCK, *about, "call", "", key, f"from {event.agent}")
