"""RunGuard as an interceptor of the AGENT-HOOKS contract: for every host that speaks it.

A host calls ``intercept`` at each point of an agent's life: before and after model calls and tool calls, and at the
beginning and the end of a session, which is one run here. The answer is a verdict that the host carries out.
"""

from collections import OrderedDict
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, Unpack

if find_spec("agent_hooks") is None:
    raise ImportError("runguard.agent_hooks needs agent-hooks-sdk: pip install 'runguard-agents[agent-hooks]'")

from agent_hooks import ALLOW, Decision, Transform, Verdict

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, Whom, guard_of
from runguard.calls.tool_calls import ToolUse
from runguard.core.decision import Trip
from runguard.core.events import Outcome
from runguard.core.identity import LruDict
from runguard.engine.guard import Controls
from runguard.policy.keywords import PolicySettings
from runguard.providers.usage import GrowingPrompts, read_usage, size_of

__all__ = ["RunGuardInterceptor"]

_GIVEN_UP_KEPT: Final = 64
_SESSIONS_KEPT: Final = 10_000  # of those that a host never ends, the ones that were used last stay open


class RunGuardInterceptor(Controls):
    """An interceptor: ``create_agent_hooks_middleware([RunGuardInterceptor(max_usd=2)])``, or ``emitter.register(…)``.

    The keywords are those of ``RunGuardPlugin``. A stop is a ``deny`` with the reason ``runguard:RULE``, for which the
    host raises its own error. A model call that failed has no point after it, so it is booked as an estimate.
    """

    def __init__(
        self,
        *,
        model: str = "",
        app: str = "",
        user: str | Callable[[Any], str] = "",
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``model``: the name to price calls by, for hosts that do not say it.

        ``app`` and ``user``: whom budgets per app and per user are for. ``user`` may be a function of the context.
        """
        self.guard = guard_of(policy)
        self._model, self._whom = model, Whom(app, user)
        self._sessions = OrderedDict[tuple[str, str], _Session]()  # by id and user: a client may name another's id

    def intercept(self, context: dict[str, Any], /) -> Any:
        """Return the verdict on one point of a session, to be awaited. The contract's type knows only the verdict."""
        return self._intercept(context)

    async def _intercept(self, context: dict[str, Any]) -> Verdict:
        if self.guard.policy.mode == "off":
            return ALLOW
        point, name = context["interception_point"], context["session"]["id"]
        whom = self._whom.of(self.guard, context, session=name)
        key = name, whom.get("user", "")
        session = self._sessions.get(key)
        if session is None:
            session = self._begun(key, context, whom)
        self._sessions.move_to_end(key)
        if point == "pre_model_call":
            return await session.ask(context)
        if point == "post_model_call":
            session.settle(context)
        elif point == "pre_tool_call":
            refusal = await session.run.tools.check(_use(context["tool_call"]))
            return ALLOW if refusal is None else Verdict.deny(reason="runguard:tool", message=refusal)
        elif point == "post_tool_call":
            return session.answered(context)
        elif point == "agent_shutdown":
            del self._sessions[key]
            session.end()
        return ALLOW

    def _begun(self, key: tuple[str, str], context: dict[str, Any], whom: dict[str, Any]) -> "_Session":
        agent = context["agent"]
        run = AgentRun.start(self.guard, agent.get("name") or agent["id"], **whom)
        run.enter()
        session = self._sessions[key] = _Session(run, self._model)
        if len(self._sessions) > _SESSIONS_KEPT:
            self._sessions.popitem(last=False)[1].end()
        return session


class _Session:
    """One session of a host: a run, and the model calls that have no answer yet."""

    def __init__(self, run: AgentRun, model: str) -> None:
        self.run, self._model = run, model
        # by the id of the request, where the host gives one: the call, and the messages that it sent
        self._open: dict[str, tuple[Permission, list[Any]]] = {}
        self._given_up = LruDict[str, Permission](_GIVEN_UP_KEPT)  # those that are booked as estimates, by the same id

    async def ask(self, context: dict[str, Any]) -> Verdict:
        messages, request = context["messages"], context.get("request_id") or ""
        for name, (earlier, sent) in list(self._open.items()):
            if name == request or messages[: len(sent)] == sent:  # this request goes on from it, so it has failed
                del self._open[name]
                self._given_up[name] = earlier
                earlier.fail(None)
        for use, is_checked in () if request else self.run.tools.waiting.values():
            if is_checked:  # no point came after it, and nothing is at work: another interceptor has refused it
                self.run.tools.skipped(use)
        model = self._model or str(context["model"]["id"])
        reply = await self.run.ask(lambda: _described(self.run.prompts, model, context))
        if not isinstance(reply, Permission):
            rule = reply.rule if isinstance(reply, Trip) else "termination"
            return Verdict.deny(reason=f"runguard:{rule}", message=str(reply))
        self._open[request] = reply, list(messages)
        if not reply.notice:
            return ALLOW
        told = [*messages, {"role": "user", "content": reply.notice}]
        return Verdict(Decision.TRANSFORM, transform=Transform("$target", told))

    def settle(self, context: dict[str, Any]) -> None:
        request, model = context.get("request_id") or "", self._model or str(context["model"]["id"])
        counts = read_usage(context.get("usage") or {}, [])
        usage = counts.usage() if counts is not None else None
        permission, _ = self._open.pop(request, (None, None))
        if permission is None:
            if usage is not None and (late := self._given_up.pop(request, None)) is not None:
                late.correct(usage, model=model)
            return
        response, content = context["response"], context["response"]["content"]
        permission.settle(
            usage,
            model=model,
            calls=[_use(call) for call in response["tool_calls"]],
            text=content if isinstance(content, str) else "",
            size=size_of([content, response["tool_calls"]]),
        )

    def answered(self, context: dict[str, Any]) -> Verdict:
        result = context["tool_result"]
        outcome = Outcome.ERROR if result["is_error"] else None
        note = self.run.tools.answered(_use(context["tool_call"]), result["value"], outcome)
        return ALLOW if note is None else Verdict(Decision.TRANSFORM, transform=Transform("$target", note))

    def end(self) -> None:
        for permission, _ in self._open.values():
            permission.fail(None)
        self.run.end()


def _described(prompts: GrowingPrompts, model: str, context: dict[str, Any]) -> ModelRequest:
    measured = prompts.measure(context["messages"])
    request = ModelRequest.of(model, [context.get("tools")], counts=context, measured=measured)
    request.fixed_output = True  # a host has no place for a lower output limit
    return request


def _use(call: dict[str, Any]) -> ToolUse:
    return ToolUse(call["id"], call["name"], call["args"])
