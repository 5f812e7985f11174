"""A conversation is measured once: each further call measures what is new, and notices edits of what is old."""

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runguard
from runguard.providers import usage
from runguard.providers.usage import GrowingPrompts, measure
from tests.kit.examples import each_row

contents = st.one_of(
    st.text(max_size=40),
    st.none(),
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=20)}), max_size=3),
    st.just([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200}}]),
    st.just([{"type": "input_audio", "input_audio": {"data": "A" * 4_000, "format": "wav"}}]),
)
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": contents})
steps = st.lists(st.lists(messages, max_size=4), min_size=1, max_size=8)


@given(begin=st.lists(messages, min_size=0, max_size=12), steps=steps, cut=st.integers(0, 5))
@settings(deadline=None)
def test_it_measures_what_measuring_the_whole_gives(begin: list[Any], steps: list[list[Any]], cut: int) -> None:
    prompts, conversation = GrowingPrompts(), list(begin)
    for number, more in enumerate(steps):
        conversation = [*conversation, *more] if number % 2 else conversation
        if not number % 2:
            conversation += more
        if number == cut:
            del conversation[1 : 1 + cut]
        assert prompts.measure(conversation) == measure(conversation)


def talk(length: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"message {n}"} for n in range(length)]


@each_row("at", [0, 1, 20, 38, 39])
def test_an_edit_in_place_is_noticed_within_a_round(at: int) -> None:
    prompts, conversation = GrowingPrompts(), talk(40)
    prompts.measure(conversation)
    conversation[at]["content"] += "x" * 10_000
    looks = [prompts.measure(conversation) for _ in range(40)]
    assert looks[-1] == measure(conversation)
    if at >= 38:
        assert looks[0] == measure(conversation), "the newest messages are measured at every call"


def test_a_replaced_message_is_noticed_at_once() -> None:
    prompts, conversation = GrowingPrompts(), talk(40)
    prompts.measure(conversation)
    conversation[20] = {"role": "user", "content": "x" * 10_000}
    assert prompts.measure(conversation) == measure(conversation)


def test_two_conversations_in_turn_are_both_known_and_a_third_takes_the_place_of_the_oldest() -> None:
    prompts = GrowingPrompts()
    for conversation in [talk(n) for n in (30, 40, 50)] * 3:
        assert prompts.measure(conversation) == measure(conversation)
    assert len(prompts._known) == usage._CONVERSATIONS


def test_only_what_is_new_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = 0

    def counting(value: Any) -> tuple[int, int]:
        nonlocal measured
        measured += len(value)
        return measure(value)

    prompts, conversation = GrowingPrompts(), talk(1_000)
    prompts.measure(conversation)
    monkeypatch.setattr(usage, "measure", counting)
    for _ in range(100):
        conversation += talk(2)
        prompts.measure(conversation)
    assert measured <= 100 * (2 + 3)


def test_a_run_that_is_over_keeps_no_prompt() -> None:
    class Text(str):
        __slots__ = ("__weakref__",)

    ask = runguard.guard(lambda **_: {"usd": 0.1}, budget={"max_usd": 5})
    text = Text("hello")
    gone = weakref.ref(text)
    with runguard.run():
        ask(messages=[*talk(20), {"role": "user", "content": text}])
    del text
    gc.collect()
    assert gone() is None
