"""No object that a provider returns can raise or take long."""

import json
import os
import subprocess
import sys
from decimal import Decimal
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from runguard.pricing.rates import Usage
from runguard.providers import usage as asking
from runguard.providers.messages import MAX_ARGUMENTS, MAX_CALLS, TEXT_CHARS, Reading, read, read_request
from runguard.providers.streams import StreamReading
from tests.kit.provider_answers import chat_chunk, kinds, names, streamed

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would ask the network for prices


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_text_calls_and_arguments_are_bounded() -> None:
    blocks = [{"type": "text", "text": "x" * 7_000}] * 3 + [{"type": "tool_use", "name": "f", "input": {}}] * 1_000
    reading = read({"content": blocks})
    assert len(reading.text) == TEXT_CHARS
    assert len(reading.calls) == MAX_CALLS
    long = json.dumps({"a": "x" * MAX_ARGUMENTS})
    message = {"tool_calls": [{"function": {"name": "f", "arguments": long}}]}
    assert read({"choices": [{"message": message}]}).calls == (("f", long),)


def test_a_stream_keeps_its_bounds_and_counts_on() -> None:
    stream = streamed(*["x" * 1_000] * 50)
    assert len(stream.reading().text) == TEXT_CHARS
    assert stream.chars == 50_000
    for n in range(1_000):
        stream.feed(
            chat_chunk({"tool_calls": [{"index": n, "id": str(n), "function": {"name": "f", "arguments": "{}"}}]})
        )
    assert len(stream.reading().calls) == MAX_CALLS


def test_arguments_that_no_parser_takes_stay_text() -> None:
    for text in ("[" * 100_000, "9" * 10_000):
        assert read(
            {"choices": [{"message": {"tool_calls": [{"function": {"name": "f", "arguments": text}}]}}]}
        ).calls == (("f", text),)


def test_classes_made_on_the_fly_are_not_kept() -> None:
    for n in range(2_000):
        read(type(f"Answer{n}", (), {"content": "x"})())
    assert len(asking._ways) <= asking._KINDS


# ---- nothing raises -------------------------------------------------------------------------------------------------


class Hostile:
    """Every way to ask it fails."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("hostile")

    __getattr__ = __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __repr__ = __str__ = __contains__ = _fail
    __hash__ = object.__hash__


class HostileDict(dict[str, Any]):
    def get(self, *_: Any) -> Any:
        raise RuntimeError("hostile")

    __getitem__ = __contains__ = __iter__ = get


class HostileList(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("hostile")

    def __getitem__(self, _: Any) -> Any:
        raise RuntimeError("hostile")


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=4)
    | kinds
    | st.builds(object)
    | st.builds(Hostile)
    | st.just(Decimal("sNaN"))
    | st.just("AUDIO")
    | st.just(HostileDict(usage=1))
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.dictionaries(names, inner, max_size=6)
    return (
        some
        | st.lists(inner, max_size=3)
        | st.builds(lambda d: SimpleNamespace(**d), some)
        | st.builds(HostileList, st.lists(inner, max_size=2))
        | st.tuples(inner, inner)
    )


anything = st.recursive(atoms, nested, max_leaves=25)


@given(st.lists(anything, min_size=1, max_size=4))
def test_whatever_is_handed_in_is_read_without_a_word(values: list[Any]) -> None:
    stream = StreamReading()
    for value in values:
        told = read(value)
        assert type(told) is Reading
        check(told)
        stream.feed(value)
    check(stream.reading())
    assert stream.chars >= 0


def check(reading: Reading) -> None:
    usage = reading.usage
    if usage is not None:
        counts = (
            usage.input,
            usage.output,
            usage.cached,
            usage.cache_write,
            usage.audio,
            usage.cached_audio,
            usage.audio_output,
            usage.thinking,
        )
        assert all(type(count) is int and count >= 0 for count in counts)
        assert usage.input or usage.output
    assert type(reading.model) is str
    assert type(reading.text) is str
    assert len(reading.text) <= TEXT_CHARS
    assert reading.usd is None or (reading.usd.is_finite() and reading.usd >= 0)
    assert all(type(name) is str for name, _ in reading.calls)


@given(st.lists(anything, max_size=3), st.dictionaries(names, anything, max_size=5))
def test_whatever_is_asked_is_read_without_a_word(args: list[Any], kwargs: dict[Any, Any]) -> None:
    asked = read_request(tuple(args), kwargs)
    assert asked.input_tokens is None or asked.input_tokens > 0
    assert asked.max_output_tokens is None or asked.max_output_tokens >= 0
    assert asked.candidates >= 1
    assert type(asked.model) is str


def test_one_hostile_part_does_not_hide_the_usage() -> None:
    reading = read({"usage": {"prompt_tokens": 5, "completion_tokens": 5}, "choices": HostileList([1])})
    assert reading.usage == Usage(5, 5)
    assert reading.problems == ("the content could not be read: RuntimeError",)


def test_a_hostile_chunk_does_not_end_the_reading() -> None:
    stream = streamed("a", {"choices": [{"delta": {"tool_calls": HostileList([1])}}]}, "b")
    assert stream.reading().text == "ab"
    assert stream.reading().problems == ("a chunk could not be read: RuntimeError",)


# ---- what it costs to have this -------------------------------------------------------------------------------------


def test_importing_it_loads_no_library_of_a_provider() -> None:
    script = (
        "import sys, runguard.providers; print([m for m in ('google', 'openai', 'anthropic', 'litellm', "
        "'genai_prices') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        == "[]"
    )
    assert find_spec("google.genai") is not None  # else the line above says nothing
