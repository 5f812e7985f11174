"""The one reader of usage, without a framework:
what counts as reported, what is estimated, and that no figure falls.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.pricing.rates import Usage
from runguard.providers.usage import CallUsage, Counts, EventUsage, read_usage
from runguard.replay.sources import run_of
from runguard.replay.steps import Asked, Faults
from tests.kit.examples import each_row

NAMES = {
    "prompt": ("prompt_token_count", "promptTokenCount"),
    "candidates": ("candidates_token_count", "candidatesTokenCount"),
    "thoughts": ("thoughts_token_count", "thoughtsTokenCount"),
    "tool": ("tool_use_prompt_token_count", "toolUsePromptTokenCount"),
    "total": ("total_token_count", "totalTokenCount"),
    "cached": ("cached_content_token_count", "cachedContentTokenCount"),
    "write": ("cache_creation_input_tokens", "cacheCreationInputTokens"),
}
REPORTS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, st.integers(0, 5_000)))


def spelled(counts: dict[str, int], how: int) -> dict[str, int]:
    return {NAMES[name][how]: count for name, count in counts.items()}


def response(counts: dict[str, int] | None, words: str = "", *, partial: bool = False, **more: Any) -> dict[str, Any]:
    content = {"parts": [{"text": words}]} if words else None
    return {
        "usage_metadata": None if counts is None else spelled(counts, 0),
        "content": content,
        "partial": partial,
        **more,
    }


@given(counts=REPORTS)
def test_objects_and_both_spellings_of_json_are_read_alike(counts: Any) -> None:
    snake, camel, typed = (
        read_usage(report, [])
        for report in (spelled(counts, 0), spelled(counts, 1), SimpleNamespace(**spelled(counts, 0)))
    )
    assert snake == camel == typed


@given(counts=REPORTS)
def test_output_follows_the_total_or_else_the_parts(counts: Any) -> None:
    read = read_usage(spelled(counts, 0), [])
    get = counts.get
    prompt, answer, total = get("prompt", 0) + get("tool", 0), get("candidates", 0), get("total", 0)
    if get("cached", 0) + get("write", 0) > prompt:
        prompt += get("cached", 0) + get("write", 0)
    if not any(count for name, count in counts.items() if name != "write"):
        assert read is None or counts.keys() > {"write"}
        return
    assert read is not None
    usage = read.usage()
    assert usage.input == prompt
    assert usage.output == (total - prompt if total >= prompt + answer else answer + get("thoughts", 0))


@given(chunks=st.lists(REPORTS, min_size=1, max_size=5), last=REPORTS)
def test_no_figure_falls_within_a_call(chunks: list[Any], last: Any) -> None:
    call, seen = CallUsage(), Counts()
    for chunk in [*chunks, last]:
        call.add(response(chunk, partial=True))
        if (counts := read_usage(spelled(chunk, 0), [])) is not None:
            seen.add(counts)
    call.add(response({"prompt": 0, "candidates": 0, "total": 0}))
    assert call.reported == (None if seen == Counts() else seen.usage())


@given(counts=REPORTS, words=st.text(min_size=1, max_size=200))
def test_a_report_with_the_answer_or_behind_it_is_the_bill(counts: Any, words: str) -> None:
    read = read_usage(spelled(counts, 0), [])
    with_it, behind = CallUsage(), CallUsage()
    with_it.add(response(counts, words))
    behind.add(response(None, words))
    assert behind.bill(50).estimated
    behind.add(response(counts, partial=True))
    assert with_it.bill(50) == behind.bill(50)
    if read is not None and not read.lacks_input and not read.is_undivided:
        usage, is_known = read.usage(), bool(read.answer or read.beside or read.total)
        expected = usage if is_known else replace(usage, output=with_it.text_tokens)  # unknown is never zero
        assert with_it.bill(50) == (expected, not is_known)


@pytest.mark.parametrize("report", [{"total": 900}, {"prompt": 0, "candidates": 0, "total": 900}])
def test_a_total_alone_is_not_added_to_an_estimate(report: dict[str, Any]) -> None:
    call = CallUsage()
    call.add(response(report, "words"))
    assert call.bill(500) == (Usage(output=900), True)
    assert call.prompt is None


def test_audio_is_counted_in_any_spelling() -> None:
    for report in (
        {"promptTokenCount": 9, "promptTokensDetails": [{"modality": "AUDIO", "tokenCount": 4}]},
        {"prompt_token_count": 9, "prompt_tokens_details": [{"modality": "audio", "token_count": 4}]},
    ):
        counts = read_usage(report, [])
        assert counts is not None
        assert counts.usage() == Usage(input=9, audio=4)


# ---- events ---------------------------------------------------------------------------------------------------------

CALL = {"content": {"parts": [{"function_call": {"name": "look", "args": {}}}]}}
PLAIN = {"prompt": 900, "candidates": 250, "total": 1_150}


def test_words_and_function_calls_of_one_answer_are_one_call() -> None:
    """LiteLLM passes them on in two events, and reports once."""
    reader = EventUsage()
    first = reader.read(response(PLAIN, "let me look", author="a"), is_answer=True)
    assert first is not None
    assert reader.read({**response(None, author="a"), **CALL}, is_answer=True) is None


def test_the_next_call_of_the_same_agent_is_one_of_its_own() -> None:
    reader = EventUsage()
    reader.read({**response(PLAIN, author="a"), **CALL}, is_answer=True)
    reader.pass_by(
        {"author": "a", "content": {"parts": [{"function_response": {"name": "look", "response": {"seen": 1}}}]}}
    )
    taken = reader.read({**response(None, author="a"), **CALL}, is_answer=True)
    assert taken is not None
    assert taken.estimated


def test_a_report_behind_its_answer_replaces_the_estimate_and_is_not_the_next_calls() -> None:
    reader = EventUsage()
    first = reader.read(response(None, "word " * 80, author="a"), is_answer=True)
    assert first == (Usage(output=100), True, None)
    assert reader.read(response(PLAIN, author="a", partial=True)) == (Usage(900, 250), False, Usage(output=100))
    assert reader.read(response({"prompt": 10, "candidates": 5, "total": 15}, "x", author="a")) == (
        Usage(10, 5),
        False,
        None,
    )


def test_branches_that_stream_side_by_side_are_told_apart() -> None:
    reader = EventUsage()
    for branch, prompt in (("b", 100), ("c", 200)):
        reader.read(
            response(
                {"prompt": prompt, "candidates": 5, "total": prompt + 5}, "x", partial=True, author="a", branch=branch
            )
        )
    for branch, prompt in (("c", 200), ("b", 100)):
        assert reader.read(response(None, "x", author="a", branch=branch)) == (Usage(prompt, 5), False, None)


# ---- the neutral format ---------------------------------------------------------------------------------------------


@each_row(
    ("tokens", "expected"),
    [
        ({"input_tokens": 0, "output_tokens": 0}, (100, 25, True)),
        ({}, (100, 25, True)),
        ({"input_tokens": 0, "output_tokens": 7}, (100, 7, True)),
        ({"input_tokens": 90, "output_tokens": 0}, (90, 0, False)),
        ({"input_tokens": 90, "output_tokens": 7}, (90, 7, False)),
    ],
)
def test_zeros_in_a_recording_are_estimated(tokens: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    steps = [
        {"kind": "message", "agent": "user", "text": "x" * 400},
        {"kind": "model", "agent": "a", "text": "y" * 100, **tokens},
    ]
    (asked,) = [step for step in run_of({"id": "r", "steps": steps}, "here", Faults()).steps if isinstance(step, Asked)]
    assert asked.usage is not None
    assert (asked.usage.input, asked.usage.output, asked.estimated) == expected
