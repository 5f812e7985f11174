"""The prompt caches of models, watched per agent and lane of a run: a warning when one is lost, and what that costs.

No setting. An adapter that keeps the request on the charge sets ``read_parts`` of the guard, so that the warning names
what has changed.
"""

from dataclasses import dataclass, field
from typing import Final

from runguard.core.decision import Action, Finding
from runguard.core.events import ModelResult
from runguard.core.money import to_usd, usd_text
from runguard.engine.charges import Charge
from runguard.engine.context import GuardContext, PromptParts
from runguard.engine.runs import Run
from runguard.pricing.rates import Rates, Usage

CACHE_RULE: Final = "prompt_cache"
_AGENTS_KEPT: Final = 1_024  # of one run
LEAST_TOKENS: Final = 2_000  # cached before and not any more
_IN_A_ROW: Final = 2
_PAUSE_S: Final = 300.0  # providers keep an unused cache for about five minutes


@dataclass(slots=True)
class WatchedPrompt:
    """The last prompt of one agent in one lane, as its model reported it, and the collapse that may have begun."""

    model: str
    usage: Usage
    at: float
    charge: Charge  # its call: a later report about it is not a new prompt
    parts: PromptParts | None
    cached: int  # tokens that were read from the cache before the collapse
    misses: int = 0  # calls in a row
    nano: int | None = 0  # what they cost more; None: the price is not known
    lost: int = 0  # tokens
    changed: list[set[str]] = field(default_factory=list)  # parts, per miss


@dataclass(slots=True)
class PromptCaches:
    """What is known of the prompt caches of one run."""

    by_agent: dict[tuple[str, str], WatchedPrompt] = field(default_factory=dict)  # by lane and agent
    warning: str = ""


class CacheWatch:
    """Learns from the settled calls of one guard.

    Providers cache the beginning of a prompt: where tools, instruction or history change near it, everything behind the
    change is paid in full again. When most of what was cached before is no longer read from the cache in two calls in a
    row, the guard warns once per run, names what changed and says what it cost. It never stops anything.

    These are not collapses: the first call of an agent, a call after a pause of more than five minutes (caches expire),
    a call to another model, and a history that became shorter (compaction). They begin a new comparison.
    """

    def __init__(self, context: GuardContext) -> None:
        self._accounts, self._deciding, self._clock = context.accounts, context.deciding, context.clock
        self._warns = context.options.get("reports", True)
        self._context = context
        context.sink.on("cached", "settle", self.settled)
        context.sink.on("run facts", "snapshot", lambda run: _facts(run.notes.get(CACHE_RULE)))

    def settled(self, run: Run, charge: Charge, usage: Usage, model: str) -> None:
        """Compare the reported usage of a call with that of the agent's call before."""
        caches: PromptCaches = run.notes.setdefault(CACHE_RULE, PromptCaches())
        read_parts = self._context.read_parts
        key = charge.lane, charge.agent
        before = caches.by_agent.get(key)
        if before is not None and before.charge is charge:
            before.model, before.usage = charge.model, usage
            return
        if before is None and len(caches.by_agent) >= _AGENTS_KEPT:
            caches.by_agent.clear()
        parts = None
        if self._warns and not caches.warning and read_parts is not None and charge.request is not None:
            parts = read_parts(charge.request(), before.parts.contents if before and before.parts else 0)
        now = WatchedPrompt(charge.model, usage, self._clock(), charge, parts, usage.cached)
        caches.by_agent[key] = now
        if before is not None and self._warns and not caches.warning and self._is_miss(before, now):
            self._missed(run, caches, before, now, usage, model)

    def _is_miss(self, before: WatchedPrompt, now: WatchedPrompt) -> bool:
        if now.model != before.model or now.at - before.at > _PAUSE_S:
            return False
        if self._context.read_parts is not None and now.charge.request is None:
            return False  # a call outside of the conversation, such as a summary
        if now.parts is not None and before.parts is not None:
            is_other = now.parts.beginning != before.parts.history
            is_shorter = now.parts.contents < before.parts.contents or now.usage.input < before.usage.input
        else:
            is_other, is_shorter = True, now.usage.input < before.usage.input
        if is_other and is_shorter:
            return False  # compacted, or another conversation
        lost = before.cached - now.usage.cached
        return lost >= LEAST_TOKENS and now.usage.cached * 2 < before.cached

    def _missed(
        self, run: Run, caches: PromptCaches, before: WatchedPrompt, now: WatchedPrompt, usage: Usage, model: str
    ) -> None:
        expected = min(before.cached, usage.input)
        now.cached, now.misses = before.cached, before.misses + 1
        now.lost = before.lost + expected - usage.cached
        now.changed = [*before.changed, changed_parts(before.parts, now.parts)]
        rates = self._accounts.rates_of(now.charge, model)
        more = None
        if isinstance(rates, Rates):
            cheap = Usage(usage.input, usage.output, expected, audio=usage.audio, audio_output=usage.audio_output)
            more = max(rates.cost(usage) - rates.cost(cheap), 0)
        now.nano = None if before.nano is None or more is None else before.nano + more
        if now.misses >= _IN_A_ROW:
            self._warn(run, caches, now)

    def _warn(self, run: Run, caches: PromptCaches, now: WatchedPrompt) -> None:
        charge, every = now.charge, set.intersection(*now.changed) or set.union(*now.changed)
        cost = "at an unknown price" if now.nano is None else f"which cost {usd_text(now.nano)} more"
        if every:
            cause = f"changed: {', '.join(sorted(every))}"
        elif now.parts is not None:
            cause = "tools, instruction and history are the same, so the provider may have dropped its cache"
        else:
            cause = "which part of the prompt changed is not known"
        caches.warning = (
            f"agent {charge.agent}: {now.lost:,} prompt tokens of its last {now.misses} calls to {charge.model} were "
            f"no longer read from the prompt cache, {cost}; {cause}"
        )
        usd = None if now.nano is None else str(to_usd(now.nano))
        evidence = ({"usd": usd or "unknown", "changed": ", ".join(sorted(every))},)
        finding = Finding(
            CACHE_RULE,
            Action.WARN,
            now.lost,
            LEAST_TOKENS,
            "cached tokens lost",
            "run",
            "",
            CACHE_RULE,
            caches.warning,
            evidence,
        )
        event = ModelResult(run.info.run, charge.lane, charge.agent, now.at, model=charge.model)
        self._deciding.decide(run, run.lane(charge.lane), event, finding)


def changed_parts(before: PromptParts | None, now: PromptParts | None) -> set[str]:
    """Return the parts of a prompt that differ from those of the one before. New contents at its end change nothing."""
    if before is None or now is None:
        return set()
    pairs = {
        "tools": (before.tools, now.tools),
        "instruction": (before.instruction, now.instruction),
        "history": (before.history, now.beginning),
    }
    return {name for name, (old, new) in pairs.items() if old != new}


def _facts(caches: PromptCaches | None) -> dict[str, str]:
    return {"prompt_cache": caches.warning} if caches is not None and caches.warning else {}
