"""Calls of remote A2A agents in a recorded session: read and billed as the live guard does it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from runguard.core.events import AgentEntered, ModelCall
from runguard.core.identity import Newest
from runguard.policy.settings import reserved_for
from runguard.pricing.rates import Rates, Usage
from runguard.providers.a2a import RESPONSE_KEY, UNREPORTED, ReplyReader, total_of
from runguard.replay.steps import Asked

if TYPE_CHECKING:
    from runguard.replay.player import Player

_PREFIX: Final = "a2a:"  # of ADK's metadata about a remote call
_TASKS_KEPT: Final = 10_000


@dataclass(slots=True)
class _OpenReply:
    """A remote call whose reply has not ended."""

    at: float | None
    branch: str
    scope: str
    reports: list[Usage] = field(default_factory=list)
    lacks_usage: bool = False


class RemoteReplies:
    """The remote calls of one session. A reply comes in several events; it is one call."""

    def __init__(self) -> None:
        self._reader = ReplyReader()
        self._open: dict[tuple[str, str], _OpenReply] = {}  # by author and branch
        self._ended = Newest[str, None](_TASKS_KEPT)  # tasks

    def read(
        self, metadata: Any, error: Any, author: str, at: float | None, branch: str, scope: str
    ) -> list[Asked] | None:
        """The calls that an event completes. None: the event is not of a remote agent."""
        key, facts = (author, branch), metadata if isinstance(metadata, dict) else {}
        response = facts.get(RESPONSE_KEY)
        if not isinstance(response, dict):
            is_remote = key in self._open or any(str(name).startswith(_PREFIX) for name in facts)
            if not error or not is_remote:
                return None
            call = self._open.setdefault(key, _OpenReply(at, branch, scope))
            call.at, call.lacks_usage = at, True  # the far side is gone, or never was there
            return self._close(key)
        task, reply = str(response.get("id") or ""), self._reader.read(response)
        if not reply.reports and task in self._ended:
            return []
        call = self._open.setdefault(key, _OpenReply(at, branch, scope))
        call.at = at
        call.reports += reply.reports
        if not reply.is_over:
            return []
        if task:
            self._ended[task] = None
        call.lacks_usage = call.lacks_usage or not call.reports
        return self._close(key)

    def rest(self) -> list[Asked]:
        """Calls whose replies never ended. What they reported until then was used."""
        return [asked for key in list(self._open) for asked in self._close(key)]

    def _close(self, key: tuple[str, str]) -> list[Asked]:
        call, author = self._open.pop(key), key[0]
        where = (call.at, author, call.branch)
        calls = [Asked(*where, scope=call.scope, reports=tuple(call.reports))] if call.reports else []
        if call.lacks_usage or not call.reports:
            calls.append(Asked(*where, scope=call.scope, reports=()))
        return calls


def play_remote(player: "Player", step: Asked, run: str, lane: str, *, is_over: bool) -> None:
    """Check, reserve and book a remote call. ``is_over``: the replayed run was stopped before, so it is only booked."""
    reports, rule = step.reports or (), player.judge.policy.remote_agent(step.agent)
    at = (player.clock.now, rule.model if reports else UNREPORTED)
    event = ModelCall(run, lane, step.agent, *at, bound=reserved_for(rule))
    if not is_over:
        player.check(AgentEntered(run, lane, step.agent, player.clock.now))
        player.check(event)
        player.reserve(event)
    player.tick(step.at)
    rates = player.judge.pricing.rates(event.model, event.at)
    nano = sum(rates.cost(usage) for usage in reports) if isinstance(rates, Rates) else None
    is_estimate = isinstance(rates, Rates) and rates.estimated
    player.book(event, total_of(reports), event.model, estimated=is_estimate, nano=nano)
