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
from runguard.core.plain_copy import HEAD, copy_of
from runguard.providers.sizes import IMAGE_TOKENS, LIKELY, UPPER, media_tokens, text_size

_log: Final = logging.getLogger("runguard")
_COUNT_S: Final = 5.0  # a slower counter would delay the call that it protects
_PART: Final = 12  # bytes of every part beside its text
_ENOUGH: Final = 64_000_000
_LOOKED_AT: Final = 4_096
_EMPTY: Final = (None, 0, 0, 0)


# How one content is recognised at little cost: its role, the number of its parts, its size, and for a large one how
# many of the first few thousand characters are texts.
Look = tuple[str | None, int, int, int]


@dataclass(slots=True)
class PromptProjection:
    """One request of an agent in a lane, and once a model has answered it, how many tokens it really was."""

    upper: int  # tokens, for reserving
    likely: int  # tokens, for the context window
    audio: int  # tokens of it
    size: int
    contents: int
    tail: Look  # of its last content
    tokens: int = 0  # as counted by the model


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


def project(request: LlmRequest, known: PromptProjection | None) -> PromptProjection:
    """The size of a request, based on the request before it. Each content is measured once.

    ADK copies all contents for every request, so an old content is recognised by its position. The last old one is
    looked at again: where it has changed, the whole request is measured.
    """
    contents = request.contents
    count = len(contents)
    if (
        known is not None
        and 0 < known.contents <= count
        and _look(contents[known.contents - 1], known.tail[2]) == known.tail
    ):
        added, audio, tail = _measure_all(contents[known.contents :])
        upper, likely = known.tokens - (-added // UPPER), known.tokens + added // LIKELY
        return PromptProjection(upper, likely, audio, known.size + added, count, tail or known.tail)
    added, audio, look = _measure_all(contents)
    size, tail = _overhead(request) + added, look or _EMPTY
    if known is not None and known.size:
        likely = size * known.tokens // known.size
        return PromptProjection(likely + likely // 8, likely, audio, size, count, tail)
    return PromptProjection(-(-size // UPPER), size // LIKELY, audio, size, count, tail)


def _measure_all(contents: list[types.Content]) -> tuple[int, int, Look | None]:
    """Bytes and audio tokens of contents, and a look at the last one."""
    total = audio = size = 0
    for content in contents:
        size, sound = _measure(content)
        total, audio = total + size, audio + sound
    if not contents:
        return 0, 0, None
    last = contents[-1]
    start = 0 if size <= _LOOKED_AT else _measure(last, whole=False)[0]
    return total, audio, (last.role, len(last.parts or ()), size, start)


def _look(content: types.Content, known_size: int) -> Look:
    """``known_size``: as it was measured before. A large content is not measured again."""
    if known_size <= _LOOKED_AT:
        return content.role, len(content.parts or ()), _measure(content)[0], 0
    return content.role, len(content.parts or ()), known_size, _measure(content, whole=False)[0]


def _measure(content: types.Content, *, whole: bool = True) -> tuple[int, int]:
    """Bytes of a content, media counted by the text that would have as many tokens; and its audio tokens.

    ``whole=False``: of large values only the first texts.
    """
    size = audio = 0
    value: Any
    for part in content.parts or ():
        size += _PART
        if part.text is not None:
            size += len(part.text) if part.text.isascii() else text_size(part.text)
        elif part.function_call is not None:
            size, value = size + len(part.function_call.name or ""), part.function_call.args
            copy = copy_of(value) if whole else None
            size += max(len(copy) - HEAD, 0) if copy is not None else size_of(value, _ENOUGH if whole else _LOOKED_AT)
        elif part.function_response is not None:
            size, value = size + len(part.function_response.name or ""), part.function_response.response
            copy = copy_of(value) if whole else None
            size += max(len(copy) - HEAD, 0) if copy is not None else size_of(value, _ENOUGH if whole else _LOOKED_AT)
        elif part.inline_data is not None:
            tokens, sound = media_tokens(part.inline_data.mime_type or "", len(part.inline_data.data or b""))
            size, audio = size + tokens * UPPER, audio + sound
        elif part.file_data is not None:
            size += IMAGE_TOKENS * UPPER  # its length is unknown
    return size, audio


def _overhead(request: LlmRequest) -> int:
    """Instruction and tool declarations: sent with every request, measured with the first."""
    config = request.config
    size = _instruction(config.system_instruction) if config.system_instruction else 0
    for tool in config.tools or ():
        for declaration in getattr(tool, "function_declarations", None) or ():
            copy = copy_of(declaration.model_dump(exclude_none=True, mode="json"))
            size += (max(len(copy) - HEAD, 0) if copy is not None else _ENOUGH) + _PART
    return size


def _instruction(value: Any) -> int:
    if isinstance(value, str):
        return text_size(value)
    if isinstance(value, types.Content):
        return _measure(value)[0]
    if isinstance(value, list):
        return sum(_instruction(item) for item in value)
    return len(value.text) if isinstance(value, types.Part) and value.text else 0
