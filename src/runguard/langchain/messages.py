"""LangChain's messages in RunGuard's terms, and the other way round."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from runguard.calls.model_calls import ModelRequest, ToolUse
from runguard.core.decision import METADATA_KEY, Trip
from runguard.engine.guard import Guard
from runguard.pricing.rates import Usage
from runguard.providers.usage import size_of
from runguard.termination.conditions import Ended

# What chat models call their output limit, in the order in which it is looked for.
_LIMITS: Final = ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict", "max_new_tokens")
_MESSAGE: Final = 4  # bytes around a message
_MODELS: Final = ("model_name", "model", "model_id")


def model_name(model: Any) -> str:
    """The name under which the provider prices the model."""
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
    """The same chat model with the name of another model of its class; None where its class has no field for it."""
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
    """The keyword by which this chat model takes an output limit."""
    fields = getattr(type(model), "model_fields", {})
    return next((key for key in _LIMITS if key in fields), _LIMITS[0])


def output_limit(model: Any, settings: dict[str, Any]) -> int | None:
    for key in _LIMITS if settings else ():
        if type(limit := settings.get(key)) is int and limit > 0:
            return limit
    kind: Any = type(model)
    for key in _existing(kind, _LIMITS):
        if type(limit := getattr(model, key, None)) is int and limit > 0:
            return limit
    return None


def request_of(model: Any, messages: Sequence[BaseMessage], others: Any, settings: dict[str, Any]) -> ModelRequest:
    """``others``: what the request holds besides messages, such as the system message and the tools."""
    prompt = [others]
    for message in messages:
        held = message.__dict__  # asking pydantic for a field that a message does not have takes long
        prompt.append(held["content"])
        if calls := held.get("tool_calls"):
            prompt.append(calls)
    return ModelRequest.of(model_name(model), prompt, output_limit(model, settings), len(messages) * _MESSAGE)


def usage_of(message: AIMessage) -> Usage | None:
    """The usage that a message reports, or None."""
    report = message.usage_metadata
    if not report:
        return None
    inputs, outputs = report.get("input_token_details") or {}, report.get("output_token_details") or {}
    return Usage(
        input=report["input_tokens"],
        output=report["output_tokens"],
        cached=inputs.get("cache_read") or 0,
        cache_write=inputs.get("cache_creation") or 0,
        audio=inputs.get("audio") or 0,
        audio_output=outputs.get("audio") or 0,
        thinking=outputs.get("reasoning") or 0,
    )


def answered_by(message: AIMessage) -> str:
    """The model that answered, as the provider names it."""
    metadata = message.response_metadata
    return next((name for key in _MODELS if isinstance(name := metadata.get(key), str)), "")


def calls_of(message: AIMessage) -> list[ToolUse]:
    """The tool calls that a message asks for, those with broken arguments included."""
    calls = [ToolUse(call["id"] or str(n), call["name"], call["args"]) for n, call in enumerate(message.tool_calls)]
    broken = message.invalid_tool_calls
    return calls + [ToolUse(call["id"] or f"invalid{n}", call["name"] or "", {}) for n, call in enumerate(broken)]


def answer_size(message: BaseMessage) -> int:
    return size_of([message.content, getattr(message, "tool_calls", None)])


def last_message(guard: Guard, end: Trip | Ended) -> AIMessage:
    """What an agent ends with: text for the user; the trip, or the reason of a condition, for programs."""
    text = end.reason if isinstance(end, Ended) else guard.stop_text(end)
    return AIMessage(content=text, response_metadata={METADATA_KEY: end.to_dict()})


def notice_message(notice: str) -> HumanMessage:
    return HumanMessage(content=notice, additional_kwargs={METADATA_KEY: "notice"})
