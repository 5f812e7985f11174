"""Requests and answers of the SDK's models: what the guard reads, and the answers that it writes itself."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from agents.exceptions import ModelBehaviorError
from agents.model_settings import ModelSettings
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.tool_calls import ToolUse
from runguard.core.events import Outcome
from runguard.pricing.rates import Usage
from runguard.providers.messages import arguments, is_search
from runguard.providers.usage import LIKELY, GrowingPrompts, fields, name_of_tool, size_of

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
    if not all(type(figure) is int and figure >= 0 for figure in (usage.input_tokens, usage.output_tokens)):
        return None
    inputs, outputs = usage.input_tokens_details, usage.output_tokens_details
    return Usage(
        input=usage.input_tokens,
        output=usage.output_tokens,
        cached=getattr(inputs, "cached_tokens", 0) or 0,
        cache_write=getattr(inputs, "cache_write_tokens", 0) or 0,
        thinking=getattr(outputs, "reasoning_tokens", 0) or 0,
        searches=sum(is_search(fields(item).get) for item in output),
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
