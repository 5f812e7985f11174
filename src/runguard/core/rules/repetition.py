"""The same call again: with the same answer, or with ever new ones.

One observation is one model response with all its calls; equal calls within it collapse. A refusal of ours is an
attempt (it counts) but never an answer (it is no progress). Tools declared as polling or paging do not enter here.
"""

import re
from typing import ClassVar, Final

from runguard.core.decision import Action, Finding, Rungs
from runguard.core.detectors.evidence import Pair, evidence_of, swap
from runguard.core.events import AgentEntered, Outcome, ToolCall, ToolResults
from runguard.core.fingerprint import answer_text

_WORD: Final = re.compile(r"[^\W_]+")
_PAGE_READ: Final = 16_384  # characters of an answer that are looked at
_PAGE_WORDS: Final = 20  # an answer with fewer different words is a state, not a page


class Repetition:
    """The same call (or batch of calls) with the same answer, in a row, by one agent.

    Nudge N rides on the Nth answer, block N refuses the Nth call, stop N ends at the Nth attempt: after a block the
    next identical attempt stops. A call that gets no answer at all and is made again stops at N, too.
    """

    sees: ClassVar[tuple[type, ...]] = (AgentEntered, ToolCall, ToolResults)
    __slots__ = ("_agent", "_batch", "_calls", "_count", "_first", "_pairs", "_silent", "_unanswered", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._first = rungs.lowest  # nothing to say below the lowest rung
        self._agent = ""
        self._pairs: frozenset[Pair] = frozenset()
        self._calls: frozenset[bytes] = frozenset()
        self._count = 0
        self._batch = ""
        # agent, response and calls that have no answer yet
        self._unanswered: tuple[str, str, frozenset[bytes | str]] = _NONE_OPEN
        self._silent = 0  # responses in a row that made the same unanswered call

    def observe(self, event: AgentEntered | ToolCall | ToolResults) -> Finding | None:
        if type(event) is ToolCall:
            found = self._attempt(event) if event.call in self._calls else None
            return found if found is not None else self._ask_again(event)
        if type(event) is AgentEntered:
            if event.branches:
                return None  # branches begin: the agent that starts them has nothing new
            # a new activation may ask once more what the last one asked; circles of them are NoNews' business
            self._count = 0
            self._pairs, self._calls = frozenset(), frozenset()
            self._unanswered = _NONE_OPEN
            return None
        assert isinstance(event, ToolResults)
        self._unanswered = _NONE_OPEN
        pairs = event.pairs
        if not pairs:
            return None  # nothing that counts, or refusals only: those were counted when the calls were made
        same_batch = bool(event.batch) and event.batch == self._batch
        if same_batch:
            pairs |= self._pairs  # the rest of a batch whose answers came one by one
        if pairs == self._pairs and event.agent == self._agent:
            self._count += not same_batch
        else:
            self._pairs, self._calls, self._count = (
                pairs,
                event.calls if not same_batch else self._calls | event.calls,
                1,
            )
        self._batch, self._agent = event.batch, event.agent
        if self._count < self._first:
            return None
        reached = self.rungs.at(self._count)
        if reached is None or reached[0] is Action.BLOCK:
            return None  # a block waits for the next call
        first = next(a for a in event.answers if a.counted)
        return Finding(
            "repetition",
            *swap(reached, self._count),
            unit="identical calls and answers",
            tool=first.tool,
            key=first.call.hex(),
            evidence=evidence_of(event),
        )

    def _attempt(self, event: ToolCall) -> Finding | None:
        block = self.rungs.block
        if block is None or event.agent != self._agent or self._count + 1 < block:
            return None
        if event.batch != self._batch or not event.batch:
            self._count += 1
            self._batch = event.batch
        action, limit = self.rungs.at(self._count) or (Action.BLOCK, block)
        evidence = ({"event": "", "tool": event.tool, "call": event.call.hex(), "answer": ""},)
        return Finding(
            "repetition",
            action,
            self._count,
            limit,
            "identical calls and answers",
            "lane",
            event.tool,
            event.call.hex(),
            "",
            evidence,
        )

    def _ask_again(self, event: ToolCall) -> Finding | None:
        """A framework may leave a call without an answer and ask the model again.

        Calls outside of a model's response never get one.
        """
        if not event.batch:
            return None
        # an agent that never answers is not asked something else by other words
        call = event.tool if event.depth else event.call
        agent, batch, calls = self._unanswered
        if event.batch == batch:
            self._unanswered = (agent, batch, calls | {call})
            return None
        self._silent = self._silent + 1 if call in calls and event.agent == agent else 1
        self._unanswered = (event.agent, event.batch, frozenset((call,)))
        if self.rungs.stop is None or self._silent < self.rungs.stop:
            return None
        return Finding(
            "repetition",
            Action.STOP,
            self._silent,
            self.rungs.stop,
            "equal calls without an answer",
            "lane",
            event.tool,
            event.call.hex(),
        )


_NONE_OPEN: Final[tuple[str, str, frozenset[bytes | str]]] = ("", "", frozenset())


class SameCall:
    """The same call over and over although its answers differ: busy waiting, or a clock in the answer.

    In a long row the words are looked at: an answer that shares less than half of them with the one before is
    another page.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_batch", "_calls", "_count", "_first", "_look_from", "_matters_from", "_words", "rungs")

    def __init__(self, rungs: Rungs, *, look_from: float | None = None) -> None:
        """``look_from``: how long a row must be before words are looked at; a journal is kept for other rungs too, so
        it wants to know early.
        """
        self.rungs = rungs
        self._calls: frozenset[bytes] = frozenset()
        self._count = 0
        self._batch = ""
        self._first = rungs.lowest  # nothing to say below the lowest rung
        self._matters_from = self._first / 2
        self._look_from = look_from or self._matters_from
        self._words: frozenset[str] = frozenset()  # of the last answer that was looked at

    def observe(self, event: ToolResults) -> Finding | None:
        calls = event.calls
        if not calls or (event.batch and event.batch == self._batch):
            return None
        self._batch = event.batch
        if calls == self._calls:
            self._count += 1
        else:
            self._calls, self._count, self._words = calls, 1, frozenset()
        if self._count >= self._look_from and self._is_another_page(event) and self._count >= self._matters_from:
            self._count = 1
        reached = self.rungs.at(self._count) if self._count >= self._first else None
        if reached is None:
            return None
        return Finding(
            "same_call",
            *swap(reached, self._count),
            unit="identical calls in a row",
            tool=event.answers[0].tool,
            key=event.answers[0].call.hex(),
            evidence=evidence_of(event),
        )

    def _is_another_page(self, event: ToolResults) -> bool:
        if event.is_understood:
            return event.another_page
        before = self._words
        text = " ".join(
            [answer_text(a.value)[:_PAGE_READ] for a in event.answers if a.counted and a.outcome is not Outcome.REFUSED]
        )
        words = self._words = frozenset(_WORD.findall(text))
        event.another_page = (
            len(words) >= _PAGE_WORDS and bool(before) and 2 * len(words & before) < len(words | before)
        )
        return event.another_page
