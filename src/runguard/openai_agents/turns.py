"""One call of ``Runner.run``: which guarded agent is at work in it, and what its requests and answers say.

``runner`` begins and ends a turn. ``agents`` and ``runner`` ask for its run.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agents import Agent, RunContextWrapper
from agents.exceptions import ModelBehaviorError
from agents.model_settings import ModelSettings
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, Spent, asked_of
from runguard.calls.surroundings import SURROUNDINGS, drive
from runguard.calls.tool_calls import ToolUse
from runguard.core.decision import Trip
from runguard.core.events import Outcome
from runguard.pricing.rates import Usage
from runguard.providers.messages import arguments, is_search
from runguard.providers.usage import LIKELY, GrowingPrompts, fields, name_of_tool, size_of

if TYPE_CHECKING:
    from runguard.openai_agents.agents import AgentGuard, GuardedAgent

TURN: Final[ContextVar["Turn | None"]] = ContextVar("runguard_openai_turn", default=None)


class Turn:
    """One call of ``Runner.run``. Agents in it work one after the other."""

    def __init__(
        self, context: Any, pending: Sequence[ToolUse] = (), asked: object = None, *, goes_on: bool = False
    ) -> None:
        """``pending``: the calls that the turn waited for, where it goes on after an approval.

        ``asked``: what the user asks, ``goes_on`` in a conversation.
        """
        self._asked, self._goes_on = asked, goes_on
        self.context = context if isinstance(context, RunContextWrapper) else RunContextWrapper(context)
        self.starting: Agent[Any] | None = None  # that the SDK begins with
        self.agent: GuardedAgent[Any] | None = None  # at work now
        self.run: AgentRun | None = None  # that the newest model call belongs to
        self.errors: dict[str, BaseException] = {}  # by tool call, until its answer is known
        self.uses: dict[str, ToolUse] = {}  # that are at work, by their ids
        self.models: dict[tuple[int, Any], Any] = {}  # guarded ones, as the SDK remembers all models of a run
        # by identity: the tool, what it held, and the guarded copy
        self.tools: dict[int, tuple[Any, tuple[Any, ...], Any]] = {}
        self._pending = {use.id: use for use in pending}
        self._keys = tuple(self._pending)
        self._place = SURROUNDINGS.get().place
        self._runs: dict[tuple[AgentGuard, ...], AgentRun] = {}
        self._lock = asyncio.Lock()
        # the tools of the agent at work, each with the arguments that its function receives; None: any
        self.offered: dict[str, frozenset[str] | None] = {}
        self.bill = Bill()

    @property
    def is_here(self) -> bool:
        """Whether the code around is the turn itself, and not one of its tools."""
        return SURROUNDINGS.get().place is self._place

    async def work(self, agent: "GuardedAgent[Any]", context: Any) -> None:
        """``agent`` makes the next model call, or has called a tool: begin its run, or hand the run over to it."""
        before, self.agent, self.context = self.agent, agent, context
        is_new = before is None or before.name != agent.name
        if before is not None and is_new and self.run is not None:
            self.run.hand_off(agent.name)
        self.run = run = await self.run_of(agent.runguard_all, agent.name)
        if is_new and not (self._keys and before is None):
            run.enter()

    async def run_of(self, guards: "Sequence[AgentGuard]", agent: str) -> AgentRun:
        """Return the run that all these guards watch, the outermost first. It begins with its first call."""
        run = self._runs.get(tuple(guards))
        if run is None:
            async with self._lock:
                for number, guard in enumerate(guards, 1):
                    known = self._runs.get(tuple(guards[:number]))
                    if known is None:
                        more = {**guard.whom.of(guard.guard, self.context), "condition": guard.condition, "around": run}
                        if not self._keys:
                            more |= asked_of(guard.guard, agent, self._asked, goes_on=self._goes_on)
                        known = await AgentRun.resume(guard.guard, agent, self._keys, **more)
                        self._runs[tuple(guards[:number])] = known
                        self.bill.add(guard, known)
                    run = known
        assert run is not None, "an agent or a model without a guard asks for no run"
        run.agent = run.tools.agent = agent
        return run

    def around(self) -> AgentRun | None:
        """Return the run of the newest model call, or of the first one to come: an agent begins before it."""
        guards = getattr(self.starting, "runguard_all", ())
        if self.run is None and self.starting is not None and guards and not self._keys:
            return drive(partial(self.run_of, guards, self.starting.name), False, AgentRun.end)
        return self.run

    def see_answers(self, run: AgentRun, items: Any) -> None:
        """Report answers that no guarded tool has given: of unknown and of unguarded tools, and of refusals."""
        self.uses.clear()  # some were not executed after all
        waiting = run.tools.waiting
        known, pending, self._pending = run.tools.asked, self._pending, {}
        waiting |= {name: (use, False) for name, use in pending.items() if name not in known}
        if not waiting or isinstance(items, str):
            return
        for item in reversed(items):
            if not waiting:
                return
            found = answer_in(item)
            if found is None or found[0] not in waiting:
                continue
            (name, value, outcome), is_function = found, fields(item).get("type") == "function_call_output"
            use, is_checked = waiting.pop(name)
            if is_checked:
                run.tools.answered(use, value)
                continue
            if self.agent is not None and use.tool not in self.offered and is_function:
                outcome = Outcome.UNKNOWN_TOOL
            # A guarded function that was executed was checked. Other tools have no place for a check.
            executed = self.context.is_tool_approved(use.tool, name) is not False
            run.tools.saw(use, value, outcome, executed=executed and (self.agent is None or not is_function))

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """End the call of ``Runner.run``, which returned or failed. Keep a turn that waits for a human."""
        pending = [name for item in getattr(result, "interruptions", None) or () if (name := call_id_of(item))]
        for run in reversed(self._runs.values()):
            run.guard.faults.attempt("adapter", self._settle_tools, run, pending, error)
            if pending:
                run.pause(pending)
            elif run.is_unfinished and getattr(result, "final_output", None) is None:
                run.pause(list(run.tools.asked), waits=False)  # it can go on from its state
            else:
                run.end()
        self.bill.close()

    def _settle_tools(self, run: AgentRun, pending: list[str], error: BaseException | None) -> None:
        open_calls = [(use, name) for name, (use, is_checked) in run.tools.waiting.items() if is_checked]
        for use, name in open_calls:
            if name in pending:
                run.tools.deferred(use)
            elif (found := self.errors.get(name)) is not None:
                run.tools.raised(use, found)
            elif isinstance(error, Exception) and len(open_calls) == 1:
                run.tools.raised(use, error.__cause__ or error)


class Bill:
    """What a turn has cost, by guard, and what has stopped it. Results of the SDK carry it, and can be copied."""

    def __init__(self, sums: "dict[int, Spent] | None" = None, trip: Trip | None = None) -> None:
        self._sums, self._trip = sums or {}, trip
        self._runs: dict[int, AgentRun] = {}

    def __deepcopy__(self, memo: Any) -> "Bill":
        return Bill(self._now(), self.trip)

    def __reduce__(self) -> Any:
        return Bill, (self._now(), self.trip)

    @property
    def trip(self) -> Trip | None:
        """What has stopped the turn."""
        stops = (stop for run in self._runs.values() if (stop := run.stopped) is not None)
        return next(stops, self._trip)

    def add(self, guard: "AgentGuard", run: AgentRun) -> None:
        self._runs.setdefault(id(guard), run)

    def _now(self) -> dict[int, Spent]:
        return self._sums | {guard: run.spent for guard, run in self._runs.items()}

    def of(self, guard: "AgentGuard") -> Spent | None:
        return self._now().get(id(guard))

    def close(self) -> None:
        """Keep the figures and the stop alone."""
        self._sums, self._trip, self._runs = self._now(), self.trip, {}


def call_id_of(item: Any) -> str:
    """Return the id of the tool call that an approval is for."""
    found = fields(getattr(item, "raw_item", item))
    return str(found.get("call_id") or found.get("id") or "")


def pending_of(state: Any) -> list[ToolUse]:
    """Return the tool calls that a run waits for: those to be approved, or those of its newest response."""
    waiting = [getattr(item, "raw_item", item) for item in state.get_interruptions()]
    if found := [call_in(item) or ToolUse(call_id_of(item), "") for item in waiting if call_id_of(item)]:
        return found
    responses = getattr(state, "_model_responses", None) or ()
    output = responses[-1].output if responses else ()
    return [use for item in output if (use := call_in(item)) is not None and use.id]


def as_failure(error: BaseException, output: object) -> BaseException | None:
    """Return how a tool has failed; None: the model gave wrong arguments, so that the tool did not fail."""
    if isinstance(error, ModelBehaviorError):
        return None
    return error if isinstance(error, Exception) else TimeoutError(str(output))


# ---- Requests and answers of the SDK's models: what the guard reads, and the answers that it writes itself.

# ---- Requests.


class Asked:
    """One call of a model, as the SDK makes it."""

    def __init__(self, model: str, given: tuple[Any, ...], more: dict[str, Any]) -> None:
        """``given``: the positional arguments of ``Model.get_response``. ``more``: those by name."""
        self.model, self.more = model, more
        self.instructions, self.items, self.settings, self.tools, self.schema, self.handoffs, self.tracing = given

    @property
    def given(self) -> tuple[Any, ...]:
        """Return the positional arguments, with all changes."""
        first = (self.instructions, self.items, self.settings, self.tools)
        return (*first, self.schema, self.handoffs, self.tracing)

    @property
    def is_structured(self) -> bool:
        return self.schema is not None and not self.schema.is_plain_text()

    def request(self, prompts: GrowingPrompts) -> ModelRequest:
        """Return what the guard reserves for the call."""
        settings, measured = self.settings, prompts.measure(self.items)
        options = {
            "conversation": self.more.get("conversation_id"),
            "previous_response_id": self.more.get("previous_response_id"),
            "extra_body": settings.extra_body,
            "extra_args": settings.extra_args,
        }
        return ModelRequest.of(
            *(self.model, self._fixed(), settings.max_tokens),
            counts=self._named(),
            measured=measured,
            options=options,
            tools=[name_of_tool(tool) for tool in self.tools],
        )

    def _fixed(self) -> list[Any]:
        """Return what goes with every request beside the conversation."""
        found: list[Any] = [self.instructions] if self.instructions else []
        for tool in self.tools:
            hosted = getattr(tool, "tool_config", None)
            schema = getattr(tool, "params_json_schema", None)
            found.append([name_of_tool(tool), getattr(tool, "description", ""), schema, hosted])
        found += [[one.tool_name, one.tool_description, one.input_json_schema] for one in self.handoffs]
        if self.is_structured:
            found.append(self.schema.json_schema())
        if (prompt := self.more.get("prompt")) is not None:
            found.append(prompt)
        return found

    def _named(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "system_instructions": self.instructions,
            "input": self.items,
            "model_settings": self.settings,
            "tools": self.tools,
            "output_schema": self.schema,
            "handoffs": self.handoffs,
            **self.more,
        }

    def changed(self, permission: Permission) -> "Asked":
        """Return the request with a notice, without withheld tools, and with the output limit that a budget can pay."""
        made = Asked(self.model, self.given, self.more)
        if permission.notice:
            made.items = [*([{"role": "user", "content": self.items}] if isinstance(self.items, str) else self.items)]
            made.items.append({"role": "user", "content": permission.notice})
        if (limit := permission.max_output_tokens) is not None:
            made.settings = replace(made.settings, max_tokens=limit)
        if permission.withheld:
            made.tools = permission.left(made.tools, name_of_tool, made.settings.tool_choice)
        if permission.last_after is not None:
            made.settings = replace(made.settings, tool_choice=None, parallel_tool_calls=None)
            made.tools, made.handoffs = [], []
        return made


# ---- Answers.


def settle_answer(permission: Permission, response: Any, asked: Asked) -> None:
    """Report the usage, the tool calls and the text of an answer."""
    output = response.output
    names = {one.tool_name for one in asked.handoffs}
    calls = [use for item in output if (use := call_in(item)) is not None and use.tool not in names]
    texts = _texts(output)
    permission.settle(
        usage_of(response.usage, output),
        calls=calls,
        text="" if len(calls) < len(output) - len(texts) else "".join(texts),
        size=partial(size_of, output),
        answer=getattr(response, "response_id", None) or getattr(response, "id", None) or "",
    )


# What the SDK executes in this process, by the type of an item: the name of the tool, and what holds its arguments.
# "" is a tool with a name of its own.
_CALLS: Final = {
    "function_call": ("", "arguments"),
    "custom_tool_call": ("", "input"),
    "shell_call": ("shell", "action"),
    "local_shell_call": ("local_shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
_ANSWERS: Final = frozenset(f"{kind}_output" for kind in _CALLS)


def call_in(item: Any) -> ToolUse | None:
    """Return the tool call that an item of an answer asks for; None: it asks for none."""
    if type(item) is ResponseFunctionToolCall:  # nearly all
        return ToolUse(item.call_id, item.name, arguments(item.arguments))
    found = fields(item)
    known = _CALLS.get(found.get("type") or "")
    if known is None:
        return None
    name, holder = known
    given = found.get(holder)
    args = given.model_dump(exclude_none=True) if hasattr(given, "model_dump") else arguments(given)
    return ToolUse(str(found.get("call_id") or found.get("id") or ""), name or str(found.get("name") or ""), args)


def answer_in(item: Any) -> tuple[str, object, Outcome | None] | None:
    """Return the id of the call that an item of a request answers, the answer, and whether it says that it failed."""
    found = fields(item)
    kind, value = found.get("type"), found.get("output")
    if kind not in _ANSWERS:
        return None
    if kind == "shell_call_output" and isinstance(value, list):
        ran = [_ran(fields(one).get) for one in value]
        value = ran[0] if len(ran) == 1 else ran
    has_failed = kind == "apply_patch_call_output" and found.get("status") == "failed"
    return str(found.get("call_id") or found.get("id") or ""), value, Outcome.ERROR if has_failed else None


def _ran(get: Any) -> dict[str, Any]:
    """Return what one command of a shell has left, in the words that the rules know."""
    end = fields(get("outcome")).get if get("outcome") is not None else {}.get
    ended: dict[str, Any] = {"status": "timeout"} if end("type") == "timeout" else {"exit_code": end("exit_code")}
    return {"stdout": get("stdout"), "stderr": get("stderr"), **ended}


def _texts(output: list[Any]) -> list[str]:
    return [
        part.text
        for item in output
        if isinstance(item, ResponseOutputMessage)
        for part in item.content
        if isinstance(part, ResponseOutputText)
    ]


def usage_of(usage: Any, output: Any) -> Usage | None:
    """Return what the provider has reported. None: nothing that can be counted."""
    if usage is None or not (usage.input_tokens or usage.output_tokens):
        return None
    if type(usage.input_tokens) is not int or type(usage.output_tokens) is not int:
        return None
    if usage.input_tokens < 0 or usage.output_tokens < 0:
        return None
    inputs, outputs = usage.input_tokens_details, usage.output_tokens_details
    return Usage(
        input=usage.input_tokens,
        output=usage.output_tokens,
        cached=getattr(inputs, "cached_tokens", 0) or 0,
        cache_write=getattr(inputs, "cache_write_tokens", 0) or 0,
        thinking=getattr(outputs, "reasoning_tokens", 0) or 0,
        searches=sum([is_search(fields(item).get) for item in output if type(item) is not ResponseFunctionToolCall]),
    )


def cut_off(error: BaseException, settings: ModelSettings) -> int:
    """Return the bytes of an answer that ended at its output limit. Not streamed, the SDK raises then, without the
    usage.
    """
    is_cut = isinstance(error, ModelBehaviorError) and "max_output_tokens" in str(error)
    return (settings.max_tokens or 0) * LIKELY if is_cut else 0


# ---- The guard's own answers.


def message(words: str, name: str) -> ResponseOutputMessage:
    """Return the message that ends a run."""
    text = ResponseOutputText(type="output_text", text=words, annotations=[])
    return ResponseOutputMessage(
        id=f"runguard_{name}", type="message", role="assistant", status="completed", content=[text]
    )


def spoken(message: ResponseOutputMessage, model: str) -> Iterator[Any]:
    """Yield the events of a model that streams ``message``."""
    [text] = message.content
    empty = ResponseOutputText(type="output_text", text="", annotations=[])
    response = Response(
        id=message.id,
        created_at=0.0,
        model=model or "runguard",
        object="response",
        output=[message],
        parallel_tool_calls=False,
        status="completed",
        tool_choice="none",
        tools=[],
    )
    begun: Any = response.model_copy(update={"output": [], "status": "in_progress"})
    item: Any = message.model_copy(update={"content": [], "status": "in_progress"})
    words = text.text if isinstance(text, ResponseOutputText) else ""
    at: Any = {"item_id": message.id, "output_index": 0, "content_index": 0}
    yield ResponseCreatedEvent(type="response.created", sequence_number=0, response=begun)
    yield ResponseOutputItemAddedEvent(type="response.output_item.added", sequence_number=1, output_index=0, item=item)
    yield ResponseContentPartAddedEvent(type="response.content_part.added", sequence_number=2, part=empty, **at)
    yield ResponseTextDeltaEvent(type="response.output_text.delta", sequence_number=3, delta=words, logprobs=[], **at)
    yield ResponseTextDoneEvent(type="response.output_text.done", sequence_number=4, text=words, logprobs=[], **at)
    yield ResponseContentPartDoneEvent(type="response.content_part.done", sequence_number=5, part=text, **at)
    yield ResponseOutputItemDoneEvent(type="response.output_item.done", sequence_number=6, output_index=0, item=message)
    yield ResponseCompletedEvent(type="response.completed", sequence_number=7, response=response)


# ---- An object that is another one of the SDK with more behaviour: of a subclass of its class, with the same state.

_T = TypeVar("_T")
_KINDS: Final = 512


@lru_cache(_KINDS)
def _kind(more: Any, kind: Any, slots: tuple[str, ...]) -> Any:
    made = type(kind.__name__, (more, kind), {"__slots__": slots, "__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


def sharing(more: type[_T], inner: Any, **own: Any) -> _T:
    """Return an object with the methods of ``more`` before those of ``inner``, which has the same attributes.

    Both see what the other one changes, and ``isinstance`` and private marks hold. ``own``: attributes of this one.
    """
    kind: Any = type(inner)
    wanted: Any = more
    made: Any = object.__new__(_kind(wanted, kind, tuple(own)))
    if hasattr(inner, "__dict__"):
        object.__setattr__(made, "__dict__", inner.__dict__)
    for base in kind.__mro__:
        declared = vars(base).get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            if name not in ("__dict__", "__weakref__") and hasattr(inner, name):
                object.__setattr__(made, name, getattr(inner, name))
    for name, value in own.items():
        object.__setattr__(made, name, value)
    shared: _T = made
    return shared
