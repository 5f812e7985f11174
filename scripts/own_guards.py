"""A pytest plugin that puts a guard around every agent of a framework's own tests: ``pytest -p own_guards``.

``OWN_SUITE`` names the framework. ``OWN_WAY`` is ``guard`` for a guard whose limits nothing reaches, or ``noop`` for
the same interference without a guard: some tests fail as soon as anything at all is around an agent.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

GENEROUS: Final[dict[str, Any]] = {
    "max_usd": 1_000_000,
    "max_model_calls": 1_000_000,
    "max_tool_failures": 1_000_000,  # tests whose tools of one name fail are no reason to stop the others'
    "on_unpriced": {"input": 1, "output": 1},
}


def _adk(guarded: bool) -> None:
    import runguard

    if guarded:
        runguard.install()


def _langchain(guarded: bool) -> None:
    from langchain import agents
    from langchain.agents import factory
    from langchain.agents.middleware import AgentMiddleware

    from runguard.langchain import RunGuardMiddleware

    class Noop(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request)

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request)

        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            return handler(request)

        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            return await handler(request)

    make = factory.create_agent

    @wraps(make)
    def create(*args: Any, middleware: Any = (), **kwargs: Any) -> Any:
        one = RunGuardMiddleware(**GENEROUS) if guarded else Noop()
        return make(*args, middleware=[one, *middleware], **kwargs)

    for module in (agents, factory):
        setattr(module, "create_agent", create)  # noqa: B010 - a typed module takes no other function


def _langgraph(guarded: bool) -> None:
    """Graphs have no guard of their own. A guard in the process must leave them as they are."""
    if guarded:
        from runguard.langchain import RunGuardMiddleware

        RunGuardMiddleware(**GENEROUS)


def _openai_agents(guarded: bool) -> None:
    from agents.run import AgentRunner

    from runguard.openai_agents import AgentGuard
    from runguard.openai_agents.runner import GuardedRunner
    from runguard.openai_agents.turns import sharing

    guard = AgentGuard(**GENEROUS)

    def around(name: str) -> None:
        run = getattr(AgentRunner, name)

        @wraps(run)
        def start(self: Any, starting_agent: Any, *args: Any, **kwargs: Any) -> Any:
            if not guarded:
                return run(self, starting_agent.clone(), *args, **kwargs)
            if isinstance(self, GuardedRunner):
                return run(self, guard.guarded(starting_agent), *args, **kwargs)
            runner = sharing(GuardedRunner, self)  # the SDK's tests set a runner of their own
            return getattr(runner, name)(starting_agent, *args, **kwargs)

        setattr(AgentRunner, name, start)

    for name in ("run", "run_sync", "run_streamed"):
        around(name)


def _pydantic_ai(guarded: bool) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.capabilities import AbstractCapability

    from runguard.pydantic_ai import RunGuard

    class Noop(AbstractCapability[Any]):
        async def wrap_run(self, ctx: Any, *, handler: Any) -> Any:
            return await handler()

        async def wrap_model_request(self, ctx: Any, *, request_context: Any, handler: Any) -> Any:
            return await handler(request_context)

        async def wrap_tool_execute(self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Any) -> Any:
            return await handler(args)

    make: Any = Agent.__init__

    @wraps(make)
    def build(self: Any, *args: Any, capabilities: Any = None, **kwargs: Any) -> None:
        one = RunGuard(**GENEROUS) if guarded else Noop()
        make(self, *args, capabilities=[one, *(capabilities or ())], **kwargs)

    setattr(Agent, "__init__", build)  # noqa: B010


AROUND: Final[dict[str, Callable[[bool], None]]] = {
    "adk": _adk,
    "langchain": _langchain,
    "langgraph": _langgraph,
    "openai-agents": _openai_agents,
    "pydantic-ai": _pydantic_ai,
}


def pytest_configure() -> None:
    AROUND[os.environ["OWN_SUITE"]](os.environ["OWN_WAY"] == "guard")
