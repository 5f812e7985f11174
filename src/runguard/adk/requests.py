"""What RunGuard changes in a request to a model, and how it compares the parts of two requests.

``plugin`` withholds tools, asks for the last answer of a stopped run, and sends a request to a cheaper model. It and
``model_calls`` cap the output. Where a prompt cache is no longer used, the engine compares requests by ``read_parts``.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from google.adk.models.base_llm import BaseLlm
from google.adk.models.gemini_context_cache_manager import GeminiContextCacheManager
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import BaseModel

from runguard.adk.runs import Invocation, project
from runguard.calls.model_calls import count_tokens
from runguard.core.events import ModelCall
from runguard.engine.context import ModelChoice, PromptParts
from runguard.engine.guard import Guard
from runguard.engine.runs import Run

# ---- Less output, fewer tools


def cap_output(request: LlmRequest, tokens: int) -> None:
    """Cap the output in a copy of the configuration, which may be shared with every later call."""
    config = request.config or types.GenerateContentConfig()
    request.config = config.model_copy(update={"max_output_tokens": tokens})


def leave_tools_out(request: LlmRequest, names: Collection[str]) -> None:
    """Take the declarations of these tools out of a request.

    Nothing is changed where no other function would be left, since some providers reject a history of calls without
    tools, or where only these may be called.
    """
    config = request.config
    calling = config.tool_config.function_calling_config if config.tool_config is not None else None
    allowed = calling.allowed_function_names if calling is not None else None
    if allowed and all(name in names for name in allowed):
        return
    given: list[Any] = [*(config.tools or ())]
    tools: list[Any] = []
    are_others = False
    for tool in given:
        declared = getattr(tool, "function_declarations", None)
        others = [one for one in declared or () if one.name not in names]
        are_others = are_others or bool(others)
        if declared and len(others) < len(declared):
            tool = tool.model_copy(update={"function_declarations": others or None})
            if not tool.model_dump(exclude_none=True):
                continue
        tools.append(tool)
    if not are_others:
        return
    update: dict[str, Any] = {"tools": tools}
    if allowed and config.tool_config is not None and calling is not None:
        kept = calling.model_copy(update={"allowed_function_names": [name for name in allowed if name not in names]})
        update["tool_config"] = config.tool_config.model_copy(update={"function_calling_config": kept})
    request.config = config.model_copy(update=update)


# ---- The last answer after a stop


async def ask_for_last_answer(guard: Guard, run: Run, event: ModelCall, agent: Any, request: LlmRequest) -> bool:
    """Make this request the last one of its run: without tools, with the instruction, within what is held.

    Its answer is the agent's own. The stop event follows it: the agents after it are skipped, and the wrapper on the
    Runner adds the event where none was. Return False if it cannot be paid; then the request is not changed.
    """
    last = guard.last_call
    assert last is not None
    before = request.config, request.tools_dict
    request.config, request.tools_dict = _without_tools(request.config, agent), {}
    request.contents.append(types.Content(role="user", parts=[types.Part(text=last.instruction)]))
    sizes = project(request, None)
    event.input_tokens, event.audio_tokens = sizes.upper, sizes.audio
    counter = guard.policy.tokens
    if counter is not None and (counted := await count_tokens(counter, request)) is not None:
        event.input_tokens = counted
    charge = await last.take(run, event)
    if charge is None:
        request.contents.pop()
        request.config, request.tools_dict = before
        return False
    return True


def _without_tools(config: types.GenerateContentConfig, agent: Any) -> types.GenerateContentConfig:
    changes: dict[str, Any] = {"tools": None, "tool_config": None}
    schema = getattr(agent, "output_schema", None)
    if schema is not None and config.response_schema is None and config.response_json_schema is None:
        # with tools, ADK takes a structured answer through a tool of its own
        changes |= {"response_schema": schema, "response_mime_type": "application/json"}
    return config.model_copy(update=changes)


def is_answer(response: LlmResponse, agent: Any) -> bool:
    """Return whether a last response can stand as the agent's answer: text, no tool call, valid for its schema."""
    parts = (response.content.parts if response.content is not None else None) or []
    if response.error_code is not None or any(part.function_call is not None for part in parts):
        return False
    text = "".join(part.text for part in parts if part.text and not part.thought)
    if not text.strip():
        return False
    schema = getattr(agent, "output_schema", None)
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        try:
            schema.model_validate_json(text)
        except ValueError:
            return False
    return True


# ---- A cheaper model


def choose_model(
    choice: ModelChoice, invocation: Invocation, event: ModelCall, agent: Any, request: LlmRequest
) -> bool:
    """Send the request to a cheaper model where a threshold says so. Return whether that is the case.

    ADK picks the model object by the agent and passes the name in the request, so the name is changed. Every model
    class of ADK that lists the name in ``supported_models()`` sends the request to that model.
    """
    run, key = invocation.run, (event.lane, event.agent)
    was_other = choice.has_chosen(run, *key)
    choice.choose(run, event, lambda: _has_open_call(request.contents), lambda model: _obstacle(agent, model, request))
    is_other = bool(event.instead_of)
    is_unknown = is_other != was_other or key not in invocation.prompts
    if is_unknown and request.cache_metadata is not None and not _caches_know_their_model():
        request.cache_metadata = None  # the cache may belong to the other model, and ADK would send it to this one
    if is_other:
        request.model = event.model
    return is_other


def _has_open_call(contents: list[types.Content]) -> bool:
    """Return whether the newest function calls lack an answer. Compare names, because ADK removes its own ids."""
    answered: Counter[str] = Counter()
    for content in reversed(contents):
        parts = content.parts or ()
        called = Counter(part.function_call.name or "" for part in parts if part.function_call is not None)
        if called:
            return bool(called - answered)
        answered.update(part.function_response.name or "" for part in parts if part.function_response is not None)
    return False


def _obstacle(agent: Any, model: str, request: LlmRequest) -> str:
    if request.previous_interaction_id is not None:
        return "the provider keeps its conversation"
    llm = getattr(agent, "canonical_model", None)
    if not isinstance(llm, BaseLlm):
        return "its model class is not known"
    if any(re.fullmatch(pattern, model) for pattern in type(llm).supported_models()):
        return ""
    return f"its model class {type(llm).__name__} does not list {model} in supported_models()"


@cache
def _caches_know_their_model() -> bool:
    """Return whether ADK itself keeps the context cache of one model from another one. Older releases do not."""
    scope = SimpleNamespace(_cache_scope=lambda: "")
    try:
        name = GeminiContextCacheManager._generate_cache_fingerprint
        return name(scope, LlmRequest(model="a"), 0) != name(scope, LlmRequest(model="b"), 0)  # type: ignore[arg-type]
    except Exception:
        return False


# ---- Digests of the parts of a request

_CONTENTS: Final = 512  # a change further behind loses little of the cache
_VALUES: Final = 32
_PLAIN: Final = (str, int, float, bool, type(None))


def read_parts(request: LlmRequest | None, contents: int) -> PromptParts | None:
    """Return digests of the parts of a request, to say what changed when a prompt cache is no longer used.

    They are made once a model has reported cached tokens. Strings keep their hash, and ADK copies contents without
    copying their strings, so a long text is hashed once. Of function calls and responses the names and the plain values
    count. None where the request is gone, or where ADK manages a context cache and takes the cached parts out of it.
    """
    if request is None or request.cache_config is not None:
        return None
    config = request.config
    history = beginning = 0
    for position, content in enumerate(request.contents[:_CONTENTS]):
        if position == contents:
            beginning = history
        history = hash((history, _content_key(content)))
    count = min(len(request.contents), _CONTENTS)
    if contents >= count:
        beginning = history if contents == count else 0
    return PromptParts(
        _tools_hash(config.tools), _instruction_hash(config.system_instruction), history, count, beginning
    )


def _content_key(content: types.Content) -> Any:
    parts: list[Any] = [content.role]
    for part in content.parts or ():
        if part.text is not None:
            parts.append(part.text)
        elif part.function_call is not None:
            parts.append((part.function_call.name, _plain_values(part.function_call.args)))
        elif part.function_response is not None:
            parts.append((part.function_response.name, _plain_values(part.function_response.response)))
        elif part.inline_data is not None:
            parts.append(len(part.inline_data.data or b""))
    return tuple(parts)


def _plain_values(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return None
    plain = [(key, value) for key, value in list(given.items())[:_VALUES] if isinstance(value, _PLAIN)]
    return len(given), tuple(plain)


def _instruction_hash(given: Any) -> int:
    if isinstance(given, str):
        return hash(given)
    if isinstance(given, types.Content):
        return hash(_content_key(given))
    return hash(tuple(_instruction_hash(item) for item in given)) if isinstance(given, list) else 0


def _tools_hash(given: Any) -> int:
    found: list[Any] = []
    for tool in given or ():
        for one in getattr(tool, "function_declarations", None) or ():
            properties = one.parameters.properties if one.parameters is not None else None
            schema = str(one.parameters_json_schema) if one.parameters_json_schema is not None else ""
            names = tuple((name, about.description) for name, about in (properties or {}).items())
            found.append((one.name, one.description, names, schema))
    return hash(tuple(found))
