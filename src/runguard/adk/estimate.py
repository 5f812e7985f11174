"""How large the next request is, before a model has counted it.

The first request of an agent is measured whole. After its answer the real prompt is known, and only what was added
since is measured: exact for the old part, an estimate for the new, and the same work however long the history has
become. Where the old part changed (compaction, another history), the whole is measured again and scaled by what was
learned.
"""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from runguard.core.fingerprint import size_of
from runguard.core.money import shown
from runguard.providers.sizes import IMAGE_TOKENS, LIKELY, UPPER, media_tokens, text_size

_log: Final = logging.getLogger("runguard")
_COUNT_S: Final = 5.0  # a slower counter would delay the call that it protects
_PART: Final = 12  # bytes of every part beside its text
_ENOUGH: Final = 64_000_000


@dataclass(slots=True)
class Prompt:
    """The last request of an agent in a lane, and how many tokens it really was."""

    tokens: int
    size: int
    contents: int
    tail: int


@dataclass(slots=True)
class PromptProjection:
    upper: int  # tokens, for reserving
    likely: int  # tokens, for the context window
    audio: int  # tokens of it
    size: int
    contents: int
    tail: int

    def learned(self, tokens: int) -> Prompt:
        return Prompt(tokens, self.size, self.contents, self.tail)


async def count_tokens(counter: Callable[..., Any], request: LlmRequest) -> int | None:
    """Call the user's own counter, sync or async. When it fails, the request is estimated and a warning logged once.

    0 is a failure too: every request has tokens, and a call that reserves nothing for its prompt overspends.
    """
    try:
        counted = counter(request)
        if inspect.isawaitable(counted):
            async with asyncio.timeout(_COUNT_S):
                counted = await counted
        if type(counted) is int and counted > 0:
            return counted
        problem = f"gave {shown(counted)}, not a number of tokens"
    except Exception as error:
        problem = f"raised {type(error).__name__}"
    if counter not in _warned:
        _warned.append(counter)
        _log.warning("runguard.counter_failed: tokens= %s; requests are estimated instead", problem)
    return None


_warned: Final[deque[Any]] = deque(maxlen=64)


def project(request: LlmRequest, known: Prompt | None) -> PromptProjection:
    """The size of a request, based on the request before it."""
    contents = request.contents
    count = len(contents)
    if known is not None and 0 < known.contents <= count and _measure(contents[known.contents - 1])[0] == known.tail:
        added = audio = 0
        for content in contents[known.contents :]:
            size, sound = _measure(content)
            added, audio = added + size, audio + sound
        tail = _measure(contents[-1])[0] if count > known.contents else known.tail
        return PromptProjection(
            known.tokens - (-added // UPPER), known.tokens + added // LIKELY, audio, known.size + added, count, tail
        )
    size, audio, tail = _overhead(request), 0, 0
    for content in contents:
        tail, sound = _measure(content)
        size, audio = size + tail, audio + sound
    if known is not None and known.size:
        likely = size * known.tokens // known.size
        return PromptProjection(likely + likely // 8, likely, audio, size, count, tail)
    return PromptProjection(-(-size // UPPER), size // LIKELY, audio, size, count, tail)


def _measure(content: types.Content) -> tuple[int, int]:
    """Bytes of a content, media counted by the text that would have as many tokens; and its audio tokens."""
    size = audio = 0
    for part in content.parts or ():
        size += _PART
        if part.text is not None:
            size += text_size(part.text)
        elif part.function_call is not None:
            size += len(part.function_call.name or "") + size_of(part.function_call.args, _ENOUGH)
        elif part.function_response is not None:
            size += len(part.function_response.name or "") + size_of(part.function_response.response, _ENOUGH)
        elif part.inline_data is not None:
            tokens, sound = media_tokens(part.inline_data.mime_type or "", len(part.inline_data.data or b""))
            size, audio = size + tokens * UPPER, audio + sound
        elif part.file_data is not None:
            size += IMAGE_TOKENS * UPPER  # its length is unknown
    return size, audio


def _overhead(request: LlmRequest) -> int:
    """Instruction and tool declarations: sent with every request, measured with the first."""
    config = request.config
    size = _instruction(config.system_instruction)
    for tool in config.tools or ():
        for declaration in getattr(tool, "function_declarations", None) or ():
            size += size_of(declaration.model_dump(exclude_none=True, mode="json"), _ENOUGH) + _PART
    return size


def _instruction(value: Any) -> int:
    if isinstance(value, str):
        return text_size(value)
    if isinstance(value, types.Content):
        return _measure(value)[0]
    if isinstance(value, list):
        return sum(_instruction(item) for item in value)
    return len(value.text) if isinstance(value, types.Part) and value.text else 0
