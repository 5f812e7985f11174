"""Reads ADK's events, and finds the run of an invocation that starts or resumes.

``plugin`` passes events to ``EventReader``. Its hooks, ``tool_hooks`` and ``cost_breaker`` find their invocation with
``RunStarter``. ``guarded_llm`` finds its run with ``history_of`` and ``run_of``.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event, EventActions
from google.genai import types

from runguard.adk.a2a import remote_budget
from runguard.adk.runs import (
    LARGE,
    Invocation,
    Invocations,
    ModelInFlight,
    OpenToolCall,
    enclosing_tool,
    lane_of,
    open_child,
)
from runguard.adk.stops import Stopper, announce, left_out, refusal, with_notice
from runguard.core.decision import ALLOW, METADATA_KEY, NOTICE_KEY, PART_STOPPED, Action, printable
from runguard.core.errors import PolicyError
from runguard.core.events import (
    Answer,
    HandOff,
    ModelCall,
    ModelResult,
    Outcome,
    RunInfo,
    StateChanged,
    ToolResults,
)
from runguard.core.identity import answer_text, input_fingerprint, words_name
from runguard.core.money import shown, to_count, to_nano
from runguard.engine.guard import Guard
from runguard.engine.resume import reopen, review_stops, run_name
from runguard.engine.runs import Run
from runguard.providers.messages import FRAMEWORK_TOOLS, REQUESTS
from runguard.providers.usage import CallUsage

_NUDGE, _BLOCK = Action.NUDGE, Action.BLOCK
_OK, _REFUSED = Outcome.OK, Outcome.REFUSED
_USER: Final = "user"
_CODE: Final = "code_execution"
_LONG_ENOUGH: Final = 40  # characters of a message that says by itself what is asked


class EventReader:
    """Passes the events of a guard's runs on to the guard.

    It reads answers of tools, hand-offs, usage of live models, and model calls that a callback or another plugin
    answered. Answers of tools are judged on the function-response event. It precedes the next model call, and shows
    what callbacks made of the answers.
    """

    def __init__(self, guard: Guard, invocations: Invocations, stopper: Stopper) -> None:
        self._guard, self._invocations, self._stopper = guard, invocations, stopper
        self._counts_code = guard.policy.max_identical_tool_results is not None

    def on_event(self, invocation: Invocation, event: Event, ic: InvocationContext) -> None:
        calls: list[types.FunctionCall] = []
        answers: list[types.FunctionResponse] = []
        of = event.__dict__
        author, actions, content = of["author"], of["actions"].__dict__, of["content"]
        parts = (content.parts if content is not None else None) or ()
        for part in parts:
            held = part.__dict__
            if held["function_call"] is not None:
                calls.append(held["function_call"])
            elif held["function_response"] is not None:
                answers.append(held["function_response"])
        target = actions["transfer_to_agent"]
        handed_in = self._transfer_lane(invocation, event, answers) if target else ""
        if answers:
            asks = actions["requested_tool_confirmations"] or actions["requested_auth_configs"]
            waiting = waiting_in(event.actions) if asks else ()
            self.judge_answers(
                invocation, answers, author=author, event_id=of["id"], waiting=waiting, hands_over=bool(target)
            )
        else:
            flown = self._release_slot(invocation, author, of["branch"])
            if calls:
                lane, long_running = flown, of["long_running_tool_ids"]
                if lane is None:
                    lane = self._event_lane(invocation, event)
                for call in calls:
                    asked = call.__dict__
                    name = asked["id"]
                    if name and name not in invocation.calls:
                        made = OpenToolCall(asked["name"] or "", asked["args"], lane, of["id"], agent=author)
                        made.asked_at = 0.0 if name in (long_running or ()) else time.monotonic()
                        invocation.calls[name] = made
                if long_running:
                    invocation.ask(long_running)
            if actions["state_delta"] or (content is None and of["output"] is not None):
                self._on_change(invocation, event)
            if invocation.live:
                self._on_live_event(invocation, event, ic)
            if self._counts_code and parts:
                self._judge_code(invocation, event, parts)
        if target:
            self.judge_transfer(invocation, handed_in, author, target)
        if self._invocations.skips:  # an agent was skipped: its event needs a mark
            self._stopper.mark(event, invocation.stop_in(self._event_lane(invocation, event)))

    def _judge_code(self, invocation: Invocation, event: Event, parts: Iterable[types.Part]) -> None:
        """Judge what executed code has printed, as an answer of a tool. Only under an explicit limit on equal ones."""
        lane, guard = self._event_lane(invocation, event), self._guard
        answers: list[Answer] = []
        for part in parts:
            if part.executable_code is not None:
                invocation.code[lane] = part.executable_code.code or ""
            elif part.code_execution_result is not None:
                result = part.code_execution_result
                call = guard.tools.fingerprint(_CODE, {"code": invocation.code.get(lane, "")})
                failed = result.outcome not in (None, types.Outcome.OUTCOME_OK)
                answers.append(Answer(_CODE, call, result.output, outcome=Outcome.FAILED if failed else None))
        if answers:
            run = invocation.run.info.run
            decision = guard.after(ToolResults(run, lane, event.author, guard.clock(), event.id, answers))
            if decision.enforced and decision.action is _NUDGE:
                invocation.run.lanes[lane].notice = decision.for_model
            elif decision.enforced and decision.trip is not None:
                announce(decision.trip, self._invocations)

    def _transfer_lane(self, invocation: Invocation, event: Event, answers: list[types.FunctionResponse]) -> str:
        """Return the lane of the call that asked for a transfer.

        The branch alone is not enough: older versions of ADK give simultaneous calls the same branch.
        """
        for answer in answers:
            asked = invocation.calls.get(answer.id or "")
            if asked is not None:
                return asked.lane
        return self._event_lane(invocation, event)

    def _event_lane(self, invocation: Invocation, event: Event) -> str:
        for flight in invocation.flights.values():
            if flight.agent == event.author and flight.branch == event.branch and flight.lane in invocation.run.lanes:
                return flight.lane
        return lane_of(self._guard, invocation, event.branch, event.isolation_scope)

    def _release_slot(self, invocation: Invocation, author: str, branch: str | None) -> str | None:
        """Release the slot of the call that an agent's event answers. Return the lane of the call, or None.

        The answer came from its model, or from a callback or a later plugin.
        """
        unanswered: tuple[asyncio.Task[Any] | None, ModelInFlight] | None = None
        for task, flight in invocation.flights.items():
            if flight.agent != author or flight.branch != branch or flight.delivered:
                continue
            if flight.done_at:
                flight.delivered = True
                return flight.lane if flight.lane in invocation.run.lanes else None
            if not flight.answered and not flight.left and unanswered is None:
                unanswered = (task, flight)
        if unanswered is not None:
            task, flight = unanswered
            flight.answered = flight.delivered = True
            self._guard.unspent(invocation.run.info.run)
            self._invocations.close_flight(flight)
            if task is not None:
                invocation.run.slots.give_back(task)
        return None

    def _on_change(self, invocation: Invocation, event: Event) -> None:
        """Report what was stored without a tool call. The text of an agent under its ``output_key`` is still talk."""
        parts = (event.content.parts if event.content is not None else None) or []
        words = "".join(part.text for part in parts if part.text and not part.thought)
        changed: list[object] = [[key, value] for key, value in event.actions.state_delta.items() if value != words]
        if not parts and event.output is not None:
            changed.append(event.output)
        if changed:
            lane, name = self._event_lane(invocation, event), words_name(answer_text(changed))
            self._guard.after(StateChanged(invocation.run.info.run, lane, event.author, self._guard.clock(), name))

    def _on_live_event(self, invocation: Invocation, event: Event, ic: InvocationContext) -> None:
        """Book the usage that a live model reports in an event. A spent budget stops it at the next user content."""
        if event.author == _USER:
            return
        run, lane, guard = invocation.run, self._event_lane(invocation, event), self._guard
        usage, prompt = invocation.live_usage.get(lane) or (CallUsage(), 0)
        usage.add(event)
        if event.usage_metadata is None:
            invocation.live_usage[lane] = usage, prompt
            return
        prompt = usage.prompt or prompt
        invocation.live_usage[lane] = CallUsage(), prompt  # one entry per lane
        if usage.reported is None and not usage.text_tokens:
            return  # the report holds zeros, and there was no answer since the last one
        billed, estimated = usage.bill(prompt)
        call = ModelCall(
            run.info.run, lane, event.author, guard.clock(), event.model_version or _live_model(ic, event.author)
        )
        run.spend.model_calls += 1
        if (
            run.model_calls is not None and guard.policy.max_model_calls is not None
        ):  # ADK's own limit excludes live calls
            run.model_calls.count += 1  # the hook's own count was taken back, because a live model answers without it
        guard.settle(guard.accounts.open_settled(run.run_costs, call), billed, estimated=estimated)
        guard.after(ModelResult(run.info.run, lane, event.author, guard.clock(), usage.prompt, billed.output))

    def judge_answers(
        self,
        invocation: Invocation,
        responses: list[types.FunctionResponse],
        *,
        author: str,
        event_id: str = "",
        waiting: Collection[str] = (),
        hands_over: bool = False,
    ) -> None:
        """Judge the answers to one model response, and add a nudge or a refusal to them.

        ``hands_over``: one of the tools set ``transfer_to_agent``. With several answers ADK does not show which one.
        """
        guard, run = self._guard, invocation.run
        answers: list[Answer] = []
        by_call: dict[str, types.FunctionResponse] = {}
        lane = batch = ""
        if waiting:
            invocation.ask(waiting)
        for response in responses:
            of = response.__dict__
            call_id, name = of["id"] or "", of["name"] or ""
            call = invocation.calls.pop(call_id, None)
            if call is None or call_id in waiting or name in FRAMEWORK_TOOLS or name.startswith(REQUESTS):
                continue  # pending confirmation or sign-in is neither failure nor repetition
            lane, batch = call.lane, call.batch
            by_call[call_id] = response
            given = of["response"]
            key = f"{lane}/{name}@{call_id}"
            has_lane = key in run.lanes
            if (has_lane and self._was_interrupted(invocation, key, given)) or (
                call.interrupted and self._is_stop_text(invocation, lane, given)
            ):
                response.response = refusal(PART_STOPPED)
                call.refused = True
            value: object = of["response"]
            if call.outcome is not None:
                value = call.error
            elif call.refused:
                call.outcome = _REFUSED
            fingerprint = call.fingerprint or guard.tools.fingerprint(name, call.args)
            outcome = call.outcome or call.verdict
            answers.append(Answer(name, fingerprint, value, call_id, outcome, event_id, args=call.args, once=call.once))
            if has_lane:
                guard.close_lane(run, key)
        if not answers:
            return
        if hands_over and len(answers) == 1:
            answers[0].hands_over = True
        decision = guard.after(ToolResults(run.info.run, lane, author, guard.clock(), batch, answers))
        if (prompt := invocation.prompts.get((lane, author))) is not None:
            prompt.answers = None
            for a in answers:
                if a.size > LARGE and a.outcome is _OK:  # an error is not measured as the model reads it
                    prompt.know(a.tool, by_call[a.id].response, a.size)
        if decision is ALLOW or not decision or not decision.enforced:
            return
        finding = decision.finding
        if decision.action is _NUDGE and finding is not None:
            nudged = next((by_call[a.id] for a in answers if a.tool == finding.tool and a.id in by_call), None)
            if nudged is not None:
                nudged.response = with_notice(nudged.response, decision.for_model)
        elif decision.action is _BLOCK:
            for a in answers:
                if a.too_large and a.id in by_call:
                    by_call[a.id].response = left_out(decision.for_model)
        elif decision.trip is not None:
            announce(decision.trip, self._invocations)

    def read_outside_answers(self, invocation: Invocation, responses: list[types.FunctionResponse]) -> None:
        """Judge answers that the user or another system gave to open calls. The user's message is not changed."""
        copies = [response.model_copy() for response in responses]
        lanes = {call.lane for response in responses if (call := invocation.calls.get(response.id or "")) is not None}
        self.judge_answers(invocation, copies, author=invocation.root_agent)
        notices = [(copy.response or {}).get(NOTICE_KEY) for copy in copies]
        for lane in lanes:
            own = invocation.run.lanes.get(lane)
            if own is not None:
                own.notice = next((notice for notice in notices if notice), own.notice)

    def _was_interrupted(self, invocation: Invocation, key: str, answer: dict[str, Any] | None) -> bool:
        """Return whether an agent called as a tool was stopped before it answered.

        An answer with text from one of its branches counts as an answer, because it is paid.
        """
        lanes = invocation.run.lanes
        own = lanes.get(key)
        if own is None:
            return False
        if own.was_stopped:
            return True
        below = next((lane for lane in lanes.values() if lane.was_stopped and lane.key.startswith(f"{key}/")), None)
        trip = invocation.run.stopped or (below.stop_in_force() if below is not None else None)
        return (
            below is not None and trip is not None and (answer or {}).get("result") in ("", self._guard.stop_text(trip))
        )

    def _is_stop_text(self, invocation: Invocation, lane: str, answer: dict[str, Any] | None) -> bool:
        """Return whether a tool answers with our stop text, because it ran an agent whose model call was refused."""
        trip = invocation.stop_in(lane)
        result = (answer or {}).get("result")
        return trip is not None and result in ("", self._guard.stop_text(trip))

    def judge_transfer(self, invocation: Invocation, lane: str, author: str, target: str) -> None:
        decision = self._guard.check(HandOff(invocation.run.info.run, lane, author, target, self._guard.clock()))
        if not decision or not decision.enforced:
            return
        if decision.action is _NUDGE:
            invocation.run.lanes[lane].notice = decision.for_model
        elif decision.trip is not None:
            announce(decision.trip, self._invocations)


def waiting_in(actions: EventActions) -> Collection[str]:
    """Return the ids of the calls that wait for a confirmation or a sign-in."""
    return {*(actions.requested_tool_confirmations or ()), *(actions.requested_auth_configs or ())}


def _live_model(ic: InvocationContext, author: str) -> str:
    """Return the model of a live agent, for events that do not name it; "" where it is unknown."""
    root = getattr(ic.agent, "root_agent", None)
    agent = (root.find_agent(author) if root is not None else None) or ic.agent
    model = getattr(agent, "canonical_live_model", None) or getattr(agent, "canonical_model", None)
    return getattr(model, "model", "") or ""


# ---- The start of an invocation


class RunStarter:
    """Registers invocations: of a new run, of a nested one, or of one that is resumed after a pause.

    ``policy_error``: an invalid policy, which stops every run.
    """

    def __init__(self, guard: Guard, invocations: Invocations, reader: EventReader, policy_error: str | None) -> None:
        self._guard, self._invocations, self._reader = guard, invocations, reader
        self._policy_error = policy_error

    async def invocation_of(self, ic: InvocationContext) -> Invocation:
        """Return the invocation that a hook is called for. Start it where no hook announced it."""
        return self._invocations.find_current(ic.invocation_id) or await self.start(ic)

    async def start(self, ic: InvocationContext, *, announced: bool = False) -> Invocation:
        """Register a nested, resumed or new invocation. ``announced``: by ADK's before-run hook, not by a later one."""
        guard, tool = self._guard, enclosing_tool(self._guard)
        if tool is not None:
            lane = open_child(guard, tool)
            facts = (ic.invocation_id, tool.invocation.run, ic.plugin_manager, ic.session.id, _root_of(ic))
            return self._invocations.register(ic, Invocation(*facts, lane=lane, depth=tool.depth + 1, nested=True))
        history = history_of(ic)
        info, wrong = self._info(ic, history.name)
        run = await run_of(guard, info, history)
        known = self._invocations.find(ic.invocation_id)
        if known is not None and known.run is run:  # resumed twice at once, so both streams belong to the same run
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
        """Return the scope and the limits of the run, and an error text when options in its RunConfig are invalid."""
        config = ic.run_config
        limit = config.max_llm_calls if config else None
        given = config.custom_metadata.get(METADATA_KEY) if config and config.custom_metadata else None
        labels, max_usd, max_tokens, wrong = run_options(given)
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
            message=" ".join([part.text for part in _parts(ic.user_content) if part.text]),
            is_automatic=not wrong and given is not None and given.get("automatic") is True,
            ceiling=ceiling,
            input=input_of(ic),
        )
        return info, wrong or sent_wrong


def _parts(content: types.Content | None) -> list[types.Part]:
    return (content.parts or []) if content is not None else []


def input_of(ic: InvocationContext) -> bytes:
    """Return the identity of the user's message to the root agent; empty for a short one inside a conversation.

    The meaning of a short message, such as "continue", depends on what was said before.
    """
    asked: list[Any] = []
    size = 0
    for part in (ic.user_content.parts if ic.user_content is not None else None) or ():
        if part.function_response is not None:
            return b""
        if part.text:
            size += len(part.text)
            asked.append(part.text)
        elif part.inline_data is not None:
            size += len(part.inline_data.data or b"")
            asked.append([part.inline_data.mime_type, part.inline_data.data])
        elif part.file_data is not None:
            size += _LONG_ENOUGH
            asked.append(part.file_data.file_uri)
    is_short = size < _LONG_ENOUGH
    if is_short and any(one.author == _USER and one.invocation_id != ic.invocation_id for one in ic.session.events):
        return b""
    return input_fingerprint(_root_of(ic), asked)


def _root_of(ic: InvocationContext) -> str:
    return getattr(ic.agent, "name", "") or ""


# ---- The run of an invocation


@dataclass(slots=True)
class SessionHistory:
    """What the session has of an invocation's current run."""

    name: str  # of the run
    before: str = ""  # the run that the user's last message has replaced
    begun: bool = False  # agents have worked in it
    questions: set[str] = field(default_factory=set)  # long-running calls, confirmations and sign-ins
    answered: set[str] = field(default_factory=set)  # by the user
    arrived: list[types.FunctionResponse] = field(default_factory=list)  # answers that no agent has worked with yet


def history_of(ic: InvocationContext) -> SessionHistory:
    """Read the events of this invocation in the session, which hold the new message already."""
    invocation_id, messages = ic.invocation_id, 0
    found = SessionHistory(invocation_id)
    for event in ic.session.events:
        if event.invocation_id != invocation_id:
            continue
        if event.author != _USER:
            found.begun = True
            found.arrived.clear()
            found.questions.update(event.long_running_tool_ids or ())
        elif _is_message(event):
            messages += 1
            found = SessionHistory(run_name(invocation_id, messages), found.name if messages > 1 else "")
        else:
            found.arrived += event.get_function_responses()
            found.answered.update(response.id or "" for response in event.get_function_responses())
    return found


def _is_message(event: Event) -> bool:
    """Return whether it is a message of the user.

    Results of tasks and summaries of compactions have the author "user" too.
    """
    parts: list[Any] = (event.content.parts if event.content is not None else None) or []
    return (
        bool(parts) and not any(part.function_response is not None for part in parts) and not event.actions.compaction
    )


async def run_of(guard: Guard, info: RunInfo, history: SessionHistory) -> Run:
    """Return the run to continue, or a new one.

    ADK resumes an invocation under its id: when a function response answers an open question, or when the caller names
    the id. Neither adds a message of the user. A further message of the user starts a new run, also where ADK uses the
    id of a paused task for it.
    """
    if history.before:
        guard.pauses.discard(replace(info, run=history.before))
    if guard.pauses.belongs_to_others(info):
        info.run = f"{info.run}@{info.session}"
    run = guard.runs.get(info.run)
    if run is not None:
        await review_stops(guard, run)
        return run
    await guard.growth.recall(info)
    return await reopen(guard, info, may_be_elsewhere=history.begun) or guard.start(info)


# ---- Options for one call of a Runner

_OPTIONS: Final = ("labels", "max_usd", "max_tokens", "automatic")
_LABELS_KEPT: Final = 64


def run_options(given: Any) -> tuple[dict[str, str], int | None, int | None, str]:
    """Return labels, nano-USD, tokens, and an error text when they are invalid, which stops the run before it pays.

    Users give them as ``RunConfig(custom_metadata={"runguard": {"labels": {"team": "search"}, "max_usd": 1}})``.
    """
    try:
        return (*_read_options({} if given is None else given), "")
    except PolicyError as error:
        return {}, None, None, f"RunConfig.custom_metadata['runguard']: {error}"


def _read_options(given: Any) -> tuple[dict[str, str], int | None, int | None]:
    if not isinstance(given, Mapping):
        raise PolicyError(f"must be a mapping with {', '.join(_OPTIONS)}, not a {type(given).__name__}")
    unknown = [str(name) for name in given if name not in _OPTIONS]
    if unknown:
        raise PolicyError(f"{', '.join(unknown)}: unknown option; known: {', '.join(_OPTIONS)}")
    labels = given.get("labels") or {}
    if not isinstance(labels, Mapping) or len(labels) > _LABELS_KEPT:
        raise PolicyError(f"labels must be a mapping of at most {_LABELS_KEPT} names to values")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise PolicyError(f"labels.{printable(str(name))} = {shown(value)}: give a text for each label")
    max_usd, max_tokens = given.get("max_usd"), given.get("max_tokens")
    if not isinstance(given.get("automatic", False), bool):
        raise PolicyError(f"automatic = {shown(given['automatic'])}: give True for a message that no person wrote")
    return (
        {str(name): str(value) for name, value in labels.items()},
        None if max_usd is None else to_nano(max_usd, "max_usd"),
        None if max_tokens is None else to_count(max_tokens, "max_tokens"),
    )
