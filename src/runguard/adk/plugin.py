"""``RunGuardPlugin``: ADK's hooks. It translates hooks to events for the guard, and decides nothing.

Register it first in ``App(plugins=[RunGuardPlugin(...)])``: a plugin before it that answers a call hides that call from
it. Results are judged on the function-response event, which precedes the next model call and shows what callbacks made
of them.
"""

import logging
from typing import Any, Final, Unpack

from google.adk.agents import BaseAgent, ParallelAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from runguard.adk import (
    nesting,  # noqa: F401 - tells other adapters about ADK's tool calls
    patching,
)
from runguard.adk.event_reader import EventReader
from runguard.adk.generations import Generations
from runguard.adk.hooks import hook
from runguard.adk.invocations import Invocations
from runguard.adk.lanes import enter, is_bounded, lane_of
from runguard.adk.model_hooks import ModelHooks
from runguard.adk.remote_agents import RemoteCalls, is_remote
from runguard.adk.run_start import RunStarter
from runguard.adk.stops import Stopper
from runguard.adk.tool_hooks import ToolHooks
from runguard.core.decision import Action
from runguard.core.errors import PolicyError
from runguard.core.events import ROOT_LANE, AgentEntered
from runguard.engine.guard import Controls, Guard
from runguard.policy.settings import Policy, PolicySettings
from runguard.pricing.book import preload

_log: Final = logging.getLogger("runguard")
_BLOCK: Final = Action.BLOCK  # bound once: a lookup on the enum costs as much as the rest of a line
NAME: Final = "runguard"
_SHOWN_LIMITS: Final = (
    "max_usd",
    "max_tokens",
    "max_context_tokens",
    "max_model_calls",
    "max_tool_calls",
    "max_seconds",
    "max_delegation_depth",
    "max_concurrent_agents",
    "max_identical_tool_results",
)


class RunGuardPlugin(Controls, BasePlugin):
    """Guards every run of the App or Runner it is registered with.

    Keywords are the policy; see ``runguard.policy.settings``.
    """

    generations: "Generations | None" = None  # of an installed guard whose policy was replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> "RunGuardPlugin":
        """A copied App has the same guard: a second one would double its budgets."""
        return self

    def __init__(self, *, name: str = NAME, **policy: Unpack[PolicySettings]) -> None:
        BasePlugin.__init__(self, name=name)
        self.policy_error: str | None = None
        self.from_file_only = name != NAME and not policy  # how ``adk web --extra_plugins`` builds it
        try:
            built = Policy.build(**policy)
        except PolicyError as error:
            if not self.from_file_only:
                raise
            # ADK only logs a constructor's exception and would go on unguarded: stop every run instead.
            self.policy_error = str(error)
            built = Policy.validated({}, "")
        self.guard = self._new_guard(built)
        self._check_store()
        self.invocations = Invocations(self.guard)
        self.stopper = Stopper(self.guard, self.invocations)
        self.reader = EventReader(self.guard, self.invocations, self.stopper)
        self.starter = RunStarter(self.guard, self.invocations, self.reader, self.policy_error)
        parts = self.guard, self.invocations, self.starter, self.stopper
        self.model_hooks, self.tool_hooks = ModelHooks(*parts), ToolHooks(*parts)
        self.remote_calls = RemoteCalls(self.guard, self.invocations)
        self._off = built.mode == "off" and self.policy_error is None
        self.warned_order = False
        patching.watch(self)
        if not self._off:
            self._load_prices()
        _log.info("runguard.start: %s", self.describe())

    def _new_guard(self, policy: Policy) -> Guard:
        return Guard(policy, gives_last_answers=True, switches_models=True)

    @property
    def _in_charge(self) -> Guard:
        """The guard under the policy in force."""
        return self.guard if self.generations is None else self.generations.newest.guard

    def _load_prices(self) -> None:
        """Load the price list now, so that no run waits for it.

        Not in a thread: a process that forks meanwhile could never import again.
        """
        try:
            preload(self.guard.policy.prices_source)
        except Exception:
            _log.warning(
                "runguard.prices_failed: the price list could not be loaded; models without prices= of your "
                "own have none",
                exc_info=True,
            )

    def _check_store(self) -> None:
        if self.policy_error is not None:
            return
        try:
            self.guard.check_store()
        except PolicyError as error:
            if not self.from_file_only:
                raise
            self.policy_error = str(error)

    def describe(self) -> str:
        """Mode, limits, store and ADK version in one line."""
        from google.adk.version import __version__ as adk_version

        policy = self.guard.policy
        limits = {name: value for name in _SHOWN_LIMITS if (value := getattr(policy, name)) is not None}
        shown = ", ".join(f"{name}={value}" for name, value in limits.items())
        if policy.budgets:
            shown += f", budgets={len(policy.budgets)}"
        return (
            f"mode={policy.mode}, on_stop={policy.on_stop}, {shown}, store={self.guard.store_name}, "
            f"policy={policy.digest}, google-adk {adk_version}"
        )

    def instead_of(self, hook: str, error: Exception, *given: Any) -> Any:
        """What ADK gets from a hook that failed."""
        return self.stopper.instead_of(hook, error, *given)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    @hook
    async def before_run_callback(self, *, invocation_context: InvocationContext) -> types.Content | None:
        if self._off:
            return None
        try:
            await self.starter.start(invocation_context, announced=True)
        except Exception as error:
            self.stopper.fault("before_run", error, invocation_context)
        return None

    @hook
    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        name = invocation_context.invocation_id
        invocation = self.invocations.find(name)
        if invocation is None:
            return
        invocation.finished = True
        # where the Runner is wrapped, the wrapper sees the end: a compaction may still follow
        if not invocation.streamed:
            self.invocations.forget(name)
            await self.invocations.written([name])

    @hook
    async def before_agent_callback(
        self, *, agent: BaseAgent, callback_context: CallbackContext
    ) -> types.Content | None:
        if self._off:
            return None
        ic = callback_context._invocation_context
        trip, lane = self.stopper.gave_up(ic.invocation_id), ROOT_LANE
        if trip is None:
            try:
                guard, invocation = self.guard, await self.starter.invocation_of(ic)
                lane = lane_of(guard, invocation, ic.branch, ic.isolation_scope)
                depth = enter(guard, invocation, agent, lane, ic.branch, ic.isolation_scope)
                branches = len(agent.sub_agents) if isinstance(agent, ParallelAgent) else 0
                is_task = getattr(agent, "mode", None) == "task"
                run = invocation.run.info.run
                entered = AgentEntered(run, lane, agent.name, guard.clock(), depth, branches, is_task)
                entered.is_bounded = is_bounded(agent)
                decision = guard.check(entered)
                if not decision.enforced or decision.action < _BLOCK:
                    if not is_remote(agent):
                        return None
                    trip = await self.remote_calls.before(agent, invocation, lane, ic)
                elif decision.action is _BLOCK:  # too deep: this agent is refused, its caller goes on
                    return types.Content(role="model", parts=[types.Part(text=decision.for_model)])
                else:
                    trip = decision.trip
            except Exception as error:
                trip = self.stopper.fault("before_agent", error, ic)
        if trip is None:
            return None
        return await self.stopper.at_agent(callback_context, agent, trip, self.invocations.find(ic.invocation_id), lane)

    @hook
    async def after_agent_callback(self, *, agent: BaseAgent, callback_context: CallbackContext) -> None:
        if is_remote(agent):
            self.remote_calls.after(agent, callback_context._invocation_context)

    # The five hooks of every step do what ``hook`` does themselves: each layer of calls counts there.

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> LlmResponse | None:
        plugin = self
        try:
            if self.generations is not None:
                plugin = self.generations.of(callback_context.invocation_id)
            return None if plugin._off else await plugin.model_hooks.before(callback_context, llm_request)
        except Exception as error:
            answer: LlmResponse | None = plugin.instead_of("before_model", error, callback_context)
            return answer

    async def after_model_callback(
        self, *, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> LlmResponse | None:
        plugin = self
        try:
            if self.generations is not None:
                plugin = self.generations.of(callback_context.invocation_id)
            stop = None if plugin._off else plugin.model_hooks.after(callback_context, llm_response)
            return None if stop is None else await plugin.stopper.at_model(callback_context, *stop)
        except Exception as error:
            plugin.instead_of("after_model", error, callback_context)
            return None

    @hook
    async def on_model_error_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest, error: Exception
    ) -> LlmResponse | None:
        stop = None if self._off else self.model_hooks.failed(callback_context.invocation_id)
        return None if stop is None else await self.stopper.at_model(callback_context, *stop)

    async def before_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        plugin = self
        try:
            if self.generations is not None:
                plugin = self.generations.of(tool_context.invocation_id)
            return None if plugin._off else await plugin.tool_hooks.before(tool, tool_args, tool_context)
        except Exception as error:
            refused: dict[str, Any] | None = plugin.instead_of("before_tool", error, tool_context)
            return refused

    async def after_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, result: dict[str, Any]
    ) -> dict[str, Any] | None:
        plugin = self
        try:
            if self.generations is not None:
                plugin = self.generations.of(tool_context.invocation_id)
            if not plugin._off:
                plugin.tool_hooks.after(tool, tool_args, tool_context, result)
        except Exception as error:
            plugin.instead_of("after_tool", error, tool_context)
        return None

    @hook
    async def on_tool_error_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, error: BaseException
    ) -> dict[str, Any] | None:
        return None if self._off else self.tool_hooks.failed(tool, tool_context, error)

    async def on_event_callback(self, *, invocation_context: InvocationContext, event: Event) -> Event | None:
        plugin = self
        try:
            if self.generations is not None:
                plugin = self.generations.of(invocation_context.invocation_id)
            if plugin._off or event.partial:
                return None
            trip = plugin.stopper.gave_up(invocation_context.invocation_id)
            if trip is not None:
                plugin.stopper.mark(event, trip)
                return None
            invocation = plugin.invocations.find(invocation_context.invocation_id)
            if invocation is not None:
                plugin.reader.on_event(invocation, event, invocation_context)
                if event.custom_metadata or event.error_message:
                    plugin.remote_calls.on_event(invocation, event)
        except Exception as error:
            plugin.instead_of("on_event", error, invocation_context)
        return None
