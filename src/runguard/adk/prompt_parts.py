"""Digests of the parts of a request, to say what changed when a prompt cache is no longer used.

Only made once a model has reported cached tokens. Strings keep their hash, and ADK copies contents without copying
their strings, so a long text is hashed once. Of function calls and responses the names and the plain values count.
"""

from collections.abc import Mapping
from typing import Any, Final

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from runguard.engine.downgrade import PromptParts

_CONTENTS: Final = 512  # a change further behind loses little of the cache
_VALUES: Final = 32
_PLAIN: Final = (str, int, float, bool, type(None))


def read_parts(request: LlmRequest | None, contents: int) -> PromptParts | None:
    """None where the request is gone, or where ADK manages a context cache and takes the cached parts out of it."""
    if request is None or request.cache_config is not None:
        return None
    config = request.config
    history = beginning = 0
    for position, content in enumerate(request.contents[:_CONTENTS]):
        if position == contents:
            beginning = history
        history = hash((history, _content(content)))
    count = min(len(request.contents), _CONTENTS)
    if contents >= count:
        beginning = history if contents == count else 0
    return PromptParts(_tools(config.tools), _instruction(config.system_instruction), history, count, beginning)


def _content(content: types.Content) -> Any:
    parts: list[Any] = [content.role]
    for part in content.parts or ():
        if part.text is not None:
            parts.append(part.text)
        elif part.function_call is not None:
            parts.append((part.function_call.name, _values(part.function_call.args)))
        elif part.function_response is not None:
            parts.append((part.function_response.name, _values(part.function_response.response)))
        elif part.inline_data is not None:
            parts.append(len(part.inline_data.data or b""))
    return tuple(parts)


def _values(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return None
    plain = [(key, value) for key, value in list(given.items())[:_VALUES] if isinstance(value, _PLAIN)]
    return len(given), tuple(plain)


def _instruction(given: Any) -> int:
    if isinstance(given, str):
        return hash(given)
    if isinstance(given, types.Content):
        return hash(_content(given))
    return hash(tuple(_instruction(item) for item in given)) if isinstance(given, list) else 0


def _tools(given: Any) -> int:
    found: list[Any] = []
    for tool in given or ():
        for one in getattr(tool, "function_declarations", None) or ():
            properties = one.parameters.properties if one.parameters is not None else None
            schema = str(one.parameters_json_schema) if one.parameters_json_schema is not None else ""
            names = tuple((name, about.description) for name, about in (properties or {}).items())
            found.append((one.name, one.description, names, schema))
    return hash(tuple(found))
