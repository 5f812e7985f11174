"""LangChain's messages and requests in RunGuard's terms, and the other way round.

``middleware`` and ``chat_model`` read every request and every answer with these functions.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from langchain.agents.structured_output import ToolStrategy
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import BaseModel

from runguard.calls.model_calls import ModelRequest as Asked
from runguard.calls.run import last_words
from runguard.calls.tool_calls import ToolUse
from runguard.core.decision import METADATA_KEY, Trip
from runguard.core.events import Outcome
from runguard.engine.guard import Guard
from runguard.pricing.rates import Usage
from runguard.providers.usage import GrowingPrompts, size_of
from runguard.termination.conditions import Ended

# What chat models call their output limit, in the order in which it is looked for.
_LIMITS: Final = ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict", "max_new_tokens")
_MESSAGE: Final = 4  # bytes around a message
_MODELS: Final = ("model_name", "model", "model_id")
_PASSED_ON: Final = ("n", "candidate_count", "cached_content", "model_kwargs", "extra_body")  # fields of chat models


def chat_models(model: Any) -> list[Any]:
    """Return the chat models that may answer: the one of a binding or a retry, and those of fallbacks."""
    if isinstance(model, BaseChatModel):
        return [model]
    if isinstance(model, RunnableWithFallbacks):
        return [one for part in (model.runnable, *model.fallbacks) for one in chat_models(part)]
    return chat_models(model.bound) if isinstance(model, RunnableBindingBase) else [model]


def bound_to(model: Any) -> dict[str, Any]:
    """Return what the bindings around a model add to each of its requests."""
    return {**bound_to(model.bound), **model.kwargs} if isinstance(model, RunnableBindingBase) else {}


def model_name(model: Any) -> str:
    """Return the name under which the provider prices the model."""
    kind: Any = type(model)
    for key in _existing(kind, _MODELS):
        if isinstance(name := getattr(model, key, None), str) and name:
            return name
    return ""


@lru_cache(maxsize=256)
def _existing(kind: type, names: tuple[str, ...]) -> tuple[str, ...]:
    """Which of these attributes the models of a class can have. Asking pydantic for a missing one takes long."""
    if not issubclass(kind, BaseModel) or kind.model_config.get("extra") == "allow":
        return names
    if any("__getattr__" in vars(base) for base in kind.__mro__ if base is not BaseModel):
        return names
    return tuple(name for name in names if name in kind.model_fields or hasattr(kind, name))


def renamed(model: Any, name: str) -> Any:
    """Return a copy of the chat model with another model's name. None: its class has no field for it."""
    fields = getattr(type(model), "model_fields", {})
    key = next((key for key in _MODELS if key in fields), None)
    if key is None:
        return None
    if str(getattr(model, key)).startswith("models/") and "/" not in name:
        name = f"models/{name}"
    return model.model_copy(update={key: name})


def has_open_call(messages: Sequence[BaseMessage]) -> bool:
    """Whether the newest tool calls of a conversation lack an answer."""
    answered: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        elif isinstance(message, AIMessage) and message.tool_calls:
            return any(call["id"] not in answered for call in message.tool_calls)
    return False


def limit_key(model: Any) -> str:
    """Return the keyword by which this chat model takes an output limit."""
    fields = getattr(type(chat_models(model)[0]), "model_fields", {})
    return next((key for key in _LIMITS if key in fields), _LIMITS[0])


def output_limit(model: Any, settings: Mapping[str, Any]) -> int | None:
    for key in _LIMITS if settings else ():
        if type(limit := settings.get(key)) is int and limit > 0:
            return limit
    kind: Any = type(model)
    for key in _existing(kind, _LIMITS):
        if type(limit := getattr(model, key, None)) is int and limit > 0:
            return limit
    return None


def passed_on(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what goes to the provider as it is, without a limit that ``output_limit`` knows."""
    found = {name: value for name, value in settings.items() if name not in _LIMITS} if settings else {}
    kind: Any = type(model)
    for name in _existing(kind, _PASSED_ON):
        if (value := getattr(model, name, None)) and name not in found:
            found[name] = value
    return found


_DECLARATIONS_KEPT: Final = 256
_declarations: Final[OrderedDict[int, tuple[Any, Any]]] = OrderedDict()  # by identity of what is kept alive here


def _once(one: Any, describe: Callable[[Any], Any]) -> Any:
    """Return the description of a tool or an output format. LangChain builds schemas anew each time: it takes long."""
    known = _declarations.get(id(one))
    if known is None or known[0] is not one:
        known = _declarations[id(one)] = (one, describe(one))
        while len(_declarations) > _DECLARATIONS_KEPT:
            _declarations.popitem(last=False)
    return known[1]


def declared(tool: Any) -> Any:
    """Return what a request says of a tool."""
    return tool if isinstance(tool, dict) else _once(tool, lambda one: [one.name, one.description, one.args])


def declared_output(output: Any) -> Any:
    """Return what a request says of the ``response_format`` of an agent."""
    return _once(output, _output_schemas) if output is not None else ""


def _output_schemas(output: Any) -> Any:
    specs = getattr(output, "schema_specs", None) or [getattr(output, "schema_spec", None)]
    if specs == [None]:  # the agent chooses later how it asks for the schema
        specs = ToolStrategy(getattr(output, "schema", output)).schema_specs
    return [[spec.name, spec.description, spec.json_schema] for spec in specs]


def request_of(
    prompts: GrowingPrompts,
    model: Any,
    messages: Sequence[BaseMessage],
    others: Any,
    settings: Mapping[str, Any],
    counts: object = None,
) -> Asked:
    """Return what is known of a request.

    ``others``: what it holds besides messages, such as the system message and the tools. ``counts``: what the user's
    own counter gets.
    """
    first, *fallbacks = chat_models(model)
    limit, measured = output_limit(first, settings), prompts.measure(messages, _said)
    around, options = len(messages) * _MESSAGE, passed_on(first, settings)
    asked = Asked.of(model_name(first), [others], limit, around, counts=counts, measured=measured, options=options)
    if fallbacks:
        limits = [asked.max_output_tokens, *[output_limit(one, settings) for one in fallbacks]]
        asked.max_output_tokens = None if None in limits else max(filter(None, limits))
        asked.others = [model_name(one) for one in fallbacks]
        asked.fixed_output = asked.fixed_output or len({limit_key(one) for one in (first, *fallbacks)}) > 1
    return asked


def _said(message: BaseMessage) -> list[Any]:
    held = message.__dict__  # asking pydantic for a field that a message does not have takes long
    calls = held.get("tool_calls")
    return [held["content"], calls] if calls else [held["content"]]


def usage_of(message: AIMessage) -> Usage | None:
    """Return the usage that a message reports, or None."""
    report = message.usage_metadata
    if not report:
        return None
    inputs: Mapping[str, Any] = report.get("input_token_details") or {}
    outputs = report.get("output_token_details") or {}
    hour = inputs.get("ephemeral_1h_input_tokens") or 0
    return Usage(
        input=report.get("input_tokens"),
        output=report.get("output_tokens"),
        cached=inputs.get("cache_read") or 0,
        # langchain-anthropic reports writes in total, or by their lifetimes with a total of 0
        cache_write=inputs.get("cache_creation") or hour + (inputs.get("ephemeral_5m_input_tokens") or 0),
        audio=inputs.get("audio") or 0,
        audio_output=outputs.get("audio") or 0,
        thinking=outputs.get("reasoning") or 0,
        cache_write_1h=hour,
    )


def answered_by(*metadata: Mapping[str, Any] | None) -> str:
    """Return the model that answered, as the provider names it in the first of these that has a name."""
    for one in filter(None, metadata):
        for key in _MODELS:
            if isinstance(name := one.get(key), str) and name:
                return name
    return ""


def response_id(message: AIMessage) -> str:
    """Return the name under which the provider may have stored an answer."""
    name = message.response_metadata.get("id")
    return name if isinstance(name, str) else ""


def calls_of(message: AIMessage) -> list[ToolUse]:
    """Return the tool calls that a message asks for, those with broken arguments included."""
    calls = [ToolUse(call["id"] or str(n), call["name"], call["args"]) for n, call in enumerate(message.tool_calls)]
    broken = message.invalid_tool_calls
    return calls + [ToolUse(call["id"] or f"invalid{n}", call["name"] or "", {}) for n, call in enumerate(broken)]


def answer_size(message: BaseMessage) -> int:
    return size_of([message.content, getattr(message, "tool_calls", None)])


def last_message(guard: Guard, end: Trip | Ended, *, takes_text: bool) -> AIMessage:
    """Return what an agent ends with: text for the user; the trip, or the reason of a condition, for programs."""
    words = last_words(guard, end, takes_text=takes_text)
    return AIMessage(content=words, response_metadata={METADATA_KEY: end.to_dict()})


def was_refused(message: BaseMessage) -> bool:
    """Whether a guard inside the model has answered in its place, so that no call was made."""
    return METADATA_KEY in message.response_metadata


def notice_message(notice: str) -> HumanMessage:
    return HumanMessage(content=notice, additional_kwargs={METADATA_KEY: "notice"})


def told(message: ToolMessage) -> tuple[Any, Outcome | None]:
    """Return what a tool answered and how it ended.

    LangGraph repeats the arguments in its errors, so equal errors would look new: what it says before them is cut off.
    """
    if message.status != "error":
        return message.content, None
    content = message.content
    if isinstance(content, str) and content.startswith(_LANGGRAPH_ERRORS):
        content = content.partition(_ARGUMENTS_END)[2] or content
    return content, Outcome.ERROR


_LANGGRAPH_ERRORS: Final = ("Error invoking tool", "Error executing tool")
_ARGUMENTS_END: Final = "with error:\n"


def newest_answers(messages: Sequence[BaseMessage]) -> Iterator[tuple[str, ToolUse, ToolMessage]]:
    """Yield the tool messages after the last answer of the model: a name for each, its call, and the message."""
    answers: list[ToolMessage] = []
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            asked = {use.id: use for use in calls_of(message)}
            for one in reversed(answers):
                if one.tool_call_id in asked:
                    # providers may number the calls of each answer from zero
                    yield f"{message.id or len(messages)} {one.tool_call_id}", asked[one.tool_call_id], one
            return
        if isinstance(message, ToolMessage):
            answers.append(message)
