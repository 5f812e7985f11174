"""A hash of what a model is asked, so that equal answers to new questions do not count as repetition."""

from typing import Any, Final

from google.adk.models.llm_request import LlmRequest

_LATEST: Final = 4  # contents: a question is the end of a history
_READ: Final = 16_384


def prompt_hash(request: LlmRequest) -> int:
    """Valid within this process. 0 where the instruction is not a text.

    Tool calls and their answers do not count: other rules judge them.
    """
    instruction = request.config.system_instruction
    if instruction is not None and type(instruction) is not str:
        return 0
    asked: list[Any] = [instruction and (len(instruction), instruction[:_READ])]
    for content in request.contents[-_LATEST:]:
        for part in content.parts or ():
            if part.text:
                asked.append(part.text[:_READ])
            elif part.inline_data is not None and part.inline_data.data:
                asked.append((len(part.inline_data.data), part.inline_data.data[:_READ]))
            elif part.file_data is not None:
                asked.append(part.file_data.file_uri)
    return hash(tuple(asked)) or 1
