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
from itertools import islice
from typing import Any, Final

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from runguard.core.identity import HEAD, copy_of, size_of
from runguard.core.money import shown
from runguard.providers.usage import IMAGE_TOKENS, LIKELY, UPPER, media_tokens, text_size

_log: Final = logging.getLogger("runguard")
_COUNT_S: Final = 5.0  # a slower counter would delay the call that it protects
_PART: Final = 12  # bytes of every part beside its text
_ENOUGH: Final = 64_000_000
LARGE: Final = 4_096  # bytes: a larger answer is not copied a second time
_FEW: Final = 4  # fields that are looked at
_LEVELS: Final = 4  # of a value, whose lengths are looked at
_WIDTH: Final = 16  # entries of each level

Look = tuple[str | None, int, int]  # how a content is recognised at little cost: role, number of parts, lengths
_EMPTY: Final[Look] = (None, 0, 0)
AnswerSizes = dict[tuple[str | None, int], int]  # by tool and lengths: ADK removes the ids of calls from a request


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
    answers: "AnswerSizes | None" = None  # of the large answers that came since

    def know(self, tool: str, answer: Any, size: int) -> None:
        """The size of a large answer, which the next request will bring."""
        key = tool, lengths_of(answer)
        self.answers = self.answers or {}
        self.answers[key] = max(size, self.answers.get(key, 0))


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
    if known is not None and 0 < known.contents <= count and _look(contents[known.contents - 1]) == known.tail:
        added, audio, tail = _measure(contents[known.contents :], known.answers)
        upper, likely = known.tokens - (-added // UPPER), known.tokens + added // LIKELY
        return PromptProjection(upper, likely, audio, known.size + added, count, tail or known.tail)
    added, audio, look = _measure(contents)
    size, tail = _overhead(request) + added, look or _EMPTY
    if known is not None and known.size:
        likely = size * known.tokens // known.size
        return PromptProjection(likely + likely // 8, likely, audio, size, count, tail)
    return PromptProjection(-(-size // UPPER), size // LIKELY, audio, size, count, tail)


def _look(content: types.Content) -> Look:
    lengths = 0
    for part in content.parts or ():
        if part.text is not None:
            lengths += len(part.text)
        elif part.function_call is not None:
            lengths += lengths_of(part.function_call.args)
        elif part.function_response is not None:
            lengths += lengths_of(part.function_response.response)
        elif part.inline_data is not None:
            lengths += len(part.inline_data.data or b"")
    return content.role, len(content.parts or ()), lengths


def lengths_of(value: Any) -> int:
    """The sum of the lengths of the texts, lists and dicts in the upper part of a value."""
    total = 0
    level: Any = (value,)
    for _ in range(_LEVELS):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                total += len(item)
            elif kind is dict:
                total += len(item)
                if len(below) < _WIDTH:
                    below += islice(item.values(), _WIDTH)
            elif kind is list or kind is tuple:
                total += len(item)
                if len(below) < _WIDTH:
                    below += item[:_WIDTH]
        if not below:
            break
        level = below
    return total


def _measure(contents: list[types.Content], answers: AnswerSizes | None = None) -> tuple[int, int, Look | None]:
    """Bytes of contents, media counted by the text that would have as many tokens; their audio tokens; and a look at
    the last one.

    ``answers``: what is known of large ones. One that has changed since is measured.
    """
    size = audio = 0
    for content in contents:
        for part in content.parts or ():
            size += _PART
            if part.text is not None:
                size += len(part.text) if part.text.isascii() else text_size(part.text)
            elif part.function_call is not None or part.function_response is not None:
                call, answer, known = part.function_call, part.function_response, None
                name, value = (call.name, call.args) if call else (answer.name, answer.response) if answer else ("", {})
                if answers is not None and answer is not None:
                    known = answers.get((name, lengths_of(value)))
                if known is None:
                    copy = copy_of(value)
                    known = max(len(copy) - HEAD, 0) if copy is not None else size_of(value, _ENOUGH)
                for field in value.values() if type(value) is dict and len(value) <= _FEW else ():
                    if type(field) is str and 2 * len(field) > known:
                        break  # one text is most of it
                else:
                    known += known // 2  # fields have 2.4 bytes per token where text has 3.2
                size += len(name or "") + known
            elif part.inline_data is not None:
                tokens, sound = media_tokens(part.inline_data.mime_type or "", len(part.inline_data.data or b""))
                size, audio = size + tokens * UPPER, audio + sound
            elif part.file_data is not None:
                size += IMAGE_TOKENS * UPPER  # its length is unknown
    return size, audio, _look(contents[-1]) if contents else None


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
        return _measure([value])[0]
    if isinstance(value, list):
        return sum(_instruction(item) for item in value)
    return len(value.text) if isinstance(value, types.Part) and value.text else 0
