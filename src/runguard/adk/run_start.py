"""The start of an invocation: a new run, a nested one, or one that is resumed after a pause."""

from google.adk.agents.invocation_context import InvocationContext

from runguard.adk.context import enclosing_tool
from runguard.adk.event_reader import EventReader
from runguard.adk.invocation_state import Invocation
from runguard.adk.invocations import Invocations
from runguard.adk.lanes import open_child
from runguard.adk.remote_budgets import remote_budget
from runguard.adk.resuming import history_of, run_of
from runguard.adk.run_options import run_options
from runguard.core.decision import METADATA_KEY
from runguard.core.events import RunInfo
from runguard.engine.guard import Guard


class RunStarter:
    """Registers invocations. ``policy_error``: an invalid policy, which stops every run."""

    def __init__(self, guard: Guard, invocations: Invocations, reader: EventReader, policy_error: str | None) -> None:
        self._guard, self._invocations, self._reader = guard, invocations, reader
        self._policy_error = policy_error

    async def invocation_of(self, ic: InvocationContext) -> Invocation:
        """The invocation that a hook is called for. Starts it where no hook announced it."""
        return self._invocations.find_current(ic.invocation_id) or await self.start(ic)

    async def start(self, ic: InvocationContext, *, announced: bool = False) -> Invocation:
        """``announced``: by ADK's before-run hook, rather than found by a later hook."""
        guard, tool = self._guard, enclosing_tool(self._guard)
        if tool is not None:
            lane = open_child(guard, tool)
            facts = (ic.invocation_id, tool.invocation.run, ic.plugin_manager, ic.session.id, _root_of(ic))
            return self._invocations.register(ic, Invocation(*facts, lane=lane, depth=tool.depth + 1, nested=True))
        history = history_of(ic)
        info, wrong = self._info(ic, history.name)
        run = await run_of(guard, info, history)
        known = self._invocations.find(ic.invocation_id)
        if known is not None and known.run is run:  # resumed twice at once: both streams are the same run
            known.entered += announced
            return self._invocations.register(ic, known)
        invocation = Invocation(ic.invocation_id, run, ic.plugin_manager, ic.session.id, _root_of(ic))
        invocation.go_on()
        invocation.resumable = ic.is_resumable
        invocation.ask(history.questions)
        invocation.questions -= history.answered
        for error in (wrong, self._policy_error):
            if error:
                guard.fail(run.info.run, "policy_error", error, invocation.root_agent)
        self._invocations.register(ic, invocation)
        if history.arrived and invocation.calls:
            self._reader.read_outside_answers(invocation, history.arrived)
        return invocation

    def _info(self, ic: InvocationContext, name: str) -> tuple[RunInfo, str]:
        """The scope and the limits of the run; and an error text when the options in its RunConfig are invalid."""
        config = ic.run_config
        limit = config.max_llm_calls if config else None
        labels, max_usd, max_tokens, wrong = run_options(
            config.custom_metadata.get(METADATA_KEY) if config and config.custom_metadata else None
        )
        ceiling, sent_wrong = remote_budget(self._guard.policy, config)
        info = RunInfo(
            run=name,
            app=ic.app_name,
            user=ic.user_id,
            session=ic.session.id,
            invocation=ic.invocation_id,
            at=self._guard.clock(),
            model_call_limit=limit if limit and limit > 0 else None,
            labels=labels,
            max_usd=max_usd,
            max_tokens=max_tokens,
            ceiling=ceiling,
        )
        return info, wrong or sent_wrong


def _root_of(ic: InvocationContext) -> str:
    return getattr(ic.agent, "name", "") or ""
