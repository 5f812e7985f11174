"""The newest tool results in a request: what the caller tells the model about the tools that its last answer asked for.

Known by their shapes: OpenAI (chat completions and responses), Anthropic, google-genai and LiteLLM, as objects or as
plain JSON.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from runguard.providers.fields import attributes, fields, items
from runguard.providers.responses import MAX_CALLS, MAX_PARTS, arguments

_MESSAGES: Final = ("messages", "contents", "input", "message", "content", "prompt")
_BODIES: Final = ("request", "llm_request", "body", "json", "payload")
_NESTED: Final = 3  # a request in a body in an argument
_NODES: Final = 512  # values of a request that are compared with the request before
_ATOMS: Final = frozenset({str, bytes, int, float, bool, type(None)})
_ANSWERS: Final = frozenset({"assistant", "model"})


class ToolResult(NamedTuple):
    """One result. ``tool`` is empty where the request does not name it."""

    tool: str
    value: object
    is_error: bool = False  # the request marks it as an error


def newest_results(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[ToolResult]:
    """The results after the model's last answer, in order; empty where the request shows none."""
    found: list[tuple[object, ToolResult]] = []
    names: dict[object, str] = {}
    for message in reversed(items(_messages(args, kwargs, 0))[-MAX_PARTS:]):
        of = fields(message).get
        kind, role = of("type"), of("role")
        if role in _ANSWERS or (type(kind) is str and kind.endswith("_call")):
            _learn_names(of, names)
            if len(found) == len(names) or role in _ANSWERS:
                break
        elif role is None and type(kind) is str and kind.endswith("_call_output"):
            found.append((of("call_id"), ToolResult("", _plain(of("output")))))
        elif names:
            break  # before the calls of the responses API
        elif role in ("tool", "function") and of("content") is not None:
            found.append((of("tool_call_id"), ToolResult(_text(of("name")), _plain(of("content")))))
        else:
            found += reversed(_blocks(of))
        if len(found) >= MAX_CALLS:
            break
    return [result if result.tool else result._replace(tool=names.get(key, "")) for key, result in reversed(found)]


def _messages(args: tuple[object, ...], kwargs: Mapping[str, object], depth: int) -> Any:
    for name in _MESSAGES:
        if (value := kwargs.get(name)) is not None:
            return value if items(value) else (value,)
    if depth >= _NESTED:
        return ()
    for value in (*args, *(kwargs.get(name) for name in _BODIES)):
        if items(value):
            return value
        held = attributes(value)
        if "function_response" in held or "functionResponse" in held or "role" in held:  # a message or a part by itself
            return (value,)
        if held and (inner := _messages((), held, depth + 1)):
            return inner
    return ()


def _blocks(of: Any) -> list[tuple[object, ToolResult]]:
    """The results inside one message: parts of Gemini, blocks of Anthropic; or the message is such a part itself."""
    found: list[tuple[object, ToolResult]] = []
    parts = items(of("parts")) or items(of("content"))
    for get in [fields(part).get for part in parts[:MAX_PARTS]] or [of]:
        if (response := get("function_response") or get("functionResponse")) is not None:
            held = fields(response).get
            found.append((held("id"), ToolResult(_text(held("name")), held("response"))))
        elif get("type") == "tool_result":
            found.append((get("tool_use_id"), ToolResult("", _plain(get("content")), get("is_error") is True)))
    return found


def _learn_names(of: Any, names: dict[object, str]) -> None:
    """Which tool each call of the model's answer named, by the id of the call."""
    if (call_id := of("call_id")) is not None:
        names[call_id] = _text(of("name")) or _text(of("type")).removesuffix("_call")
    for call in items(of("tool_calls"))[:MAX_CALLS]:
        get = fields(call).get
        names[get("id")] = _text(fields(get("function") or get("custom")).get("name"))
    for block in items(of("content"))[:MAX_PARTS]:
        get = fields(block).get
        if get("type") == "tool_use":
            names[get("id")] = _text(get("name"))


def _plain(content: Any) -> object:
    """A result as data: texts in blocks are joined, and JSON is parsed."""
    texts = [fields(block).get("text") for block in items(content)[:MAX_PARTS]]
    if texts and all(type(text) is str for text in texts):
        content = "\n".join(texts)
    return arguments(content) if type(content) is str and content[:1] in ("{", "[") else content


def _text(value: Any) -> str:
    return value if type(value) is str else ""


def request_mark(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """Equal for two requests that say the same. None: there is nothing to compare, or it cannot be compared."""
    if not args and not kwargs:
        return None
    seen: list[object] = []
    level: list[Any] = [args, kwargs]
    while level:
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _ATOMS:
                seen.append(value)
            elif kind is list or kind is tuple:
                seen.append(len(value))
                below += value
            elif kind is dict and not value:
                seen.append(kind)
            elif held := attributes(value):
                seen += held  # its names
                below += held.values()
            elif callable(value):
                seen.append(id(value))
            else:
                return None
            if len(seen) + len(below) > _NODES:
                return None
        level = below
    return hash(tuple(seen))
