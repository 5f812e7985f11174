"""The form of every rule, what its findings show, and how rules remember.

The other modules of ``rules`` build on it, and ``engine/runs`` makes the rules of a run.
"""

import re
from collections.abc import Sized
from typing import Any, ClassVar, Final, TypeVar

from runguard.core.decision import MAX_EVIDENCE, Action, Finding, Rungs
from runguard.core.events import Answer, Outcome, ToolCall, ToolResults
from runguard.core.identity import answer_text, digest, mask


class Rule:
    """Looks at the events of one lane, in order, and says what it has found.

    ``name``: of its findings. ``sees``: the event types that it observes. State that has not changed yet is an
    attribute of the class, so a lane whose rules find nothing to remember is small.

    Most events are plain: a model is called, its response calls tools and says nothing, the tools are no agents, and
    their answers are new, count and are no failures. A rule that most of these do not concern also has ``rests``, the
    types of events of which a plain one changes nothing while its ``record`` is empty, and ``record``, always the same
    object. It is not called for such events; ``runguard.engine.runs`` sees to that.
    """

    name: ClassVar[str]
    sees: ClassVar[tuple[type, ...]]
    rests: ClassVar[tuple[type, ...]] = ()
    record: Sized
    rungs: Rungs

    def observe(self, event: Any, /) -> Finding | None:
        raise NotImplementedError

    def found(
        self,
        count: float,
        unit: str,
        event: ToolResults | None = None,
        tool: str = "",
        key: str = "",
        detail: str = "",
        rungs: Rungs | None = None,
    ) -> Finding | None:
        """Return what follows from a count; None below the lowest rung.

        ``event``: the answers that show it. ``rungs``: other limits than those of the rule.
        """
        reached = (rungs or self.rungs).at(count)
        if reached is None:
            return None
        evidence = evidence_of(event) if event is not None else ()
        return Finding(self.name, reached[0], count, reached[1], unit, "lane", tool, key, detail, evidence)

    def refused(self, count: int, block: float, unit: str, event: ToolCall, key: str) -> Finding:
        """Return the finding about a call that must not be made once more. ``block``: the rung that says so."""
        action, limit = self.rungs.at(count) or (Action.BLOCK, block)
        evidence = ({"event": "", "tool": event.tool, "call": event.call.hex(), "answer": ""},)
        return Finding(self.name, action, count, limit, unit, "lane", event.tool, key, "", evidence)


class Limit(Rule):
    """A rule that allows exactly its number."""

    def __init__(self, limit: int) -> None:
        self.limit = limit


def evidence_of(event: ToolResults) -> tuple[dict[str, str], ...]:
    """Return digests of the calls and answers, because arguments and results may hold secrets."""
    return tuple(
        {"event": a.event_id, "tool": a.tool, "call": a.call.hex(), "answer": _digest_of(a)}
        for a in event.answers[:MAX_EVIDENCE]
    )


def _digest_of(answer: Answer) -> str:
    return "" if answer.outcome is Outcome.REFUSED else digest(mask(answer_text(answer.value))).hex()


def worse(one: Finding | None, other: Finding | None) -> Finding | None:
    """Return the finding with the stronger action; of two equal ones the first."""
    if one is None or (other is not None and other.action > one.action):
        return other
    return one


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def keep(kept: dict[_Key, _Value], key: _Key, value: _Value, most: int) -> _Value:
    """Set an entry as the newest one and return its value. The oldest goes when there are more than ``most``."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
    return value


WORD: Final = re.compile(r"[^\W_]+")


def words_of(text: str) -> set[str]:
    """Return the words of a text in small letters."""
    return set(WORD.findall(text.lower()))
