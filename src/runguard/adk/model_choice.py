"""A cheaper model on ADK. ADK picks the model object by the agent and passes the name in the request, so the name is
changed: every model class of ADK that lists the name in ``supported_models()`` sends the request to that model.
"""

import re
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

from google.adk.models.base_llm import BaseLlm
from google.adk.models.gemini_context_cache_manager import GeminiContextCacheManager
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from runguard.adk.invocation_state import Invocation
from runguard.core.events import ModelCall
from runguard.engine.downgrade import Downgrades


def choose_model(
    downgrades: Downgrades, invocation: Invocation, event: ModelCall, agent: Any, request: LlmRequest
) -> bool:
    """Whether the request goes to a cheaper model now."""
    run, key = invocation.run, (event.lane, event.agent)
    was_other = run.switched is not None and key in run.switched
    downgrades.choose(
        run, event, lambda: _has_open_call(request.contents), lambda model: _obstacle(agent, model, request)
    )
    is_other = bool(event.instead_of)
    is_unknown = is_other != was_other or key not in invocation.prompts
    if is_unknown and request.cache_metadata is not None and not _caches_know_their_model():
        request.cache_metadata = None  # it may be of the other model, and ADK would send it to this one
    if is_other:
        request.model = event.model
    return is_other


def _has_open_call(contents: list[types.Content]) -> bool:
    """Whether the newest function calls of a conversation lack an answer. By name: ADK removes its own ids."""
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
    """Whether ADK itself keeps the context cache of one model away from another one. Older releases do not."""
    scope = SimpleNamespace(_cache_scope=lambda: "")
    try:
        name = GeminiContextCacheManager._generate_cache_fingerprint
        return name(scope, LlmRequest(model="a"), 0) != name(scope, LlmRequest(model="b"), 0)  # type: ignore[arg-type]
    except Exception:
        return False
