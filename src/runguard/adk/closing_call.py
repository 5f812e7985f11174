"""The last answer on ADK: after a stop, one request goes to the model without tools. Its answer is the agent's own.

The stop event follows it: the agents after it are skipped, and the wrapper on the Runner adds the event where none was.
"""

from typing import Any

from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import BaseModel

from runguard.adk.estimate import count_tokens, project
from runguard.core.events import ModelCall
from runguard.engine.guard import Guard
from runguard.engine.runs import Run


async def ask_for_last_answer(guard: Guard, run: Run, event: ModelCall, agent: Any, request: LlmRequest) -> bool:
    """Make this request the last one of its run: without tools, with the instruction, within what is held.

    False: it cannot be paid, and the request is as it was.
    """
    last = guard.last_answers
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
    """Whether a last response can stand as the agent's answer: text, no tool call, valid for its schema."""
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
