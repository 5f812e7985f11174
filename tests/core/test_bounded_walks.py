"""Walks through values end early where a value is deep, cyclic or odd, and identities stay what they were."""

from typing import Any

import pytest

from runguard.core.events import ROOT_LANE, ModelCall, RunInfo, ToolCall
from runguard.core.identity import LEVELS, answer_text, copy_of, size_of, stored_attributes
from runguard.engine.guard import Guard
from runguard.policy.settings import Policy

ENOUGH = 1_000_000


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def holds_itself() -> Any:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize("value", [nested(50 * LEVELS), holds_itself()], ids=["deep", "cyclic"])  # deep for any Python
def test_a_value_that_no_encoder_can_write_is_too_large(value: Any) -> None:
    assert size_of(value, ENOUGH) == ENOUGH + 1
    assert copy_of(value) is None


def test_a_value_is_too_deep_to_be_measured_from_one_level_on() -> None:
    assert size_of(nested(LEVELS + 1), ENOUGH) == ENOUGH + 1


def test_keys_that_are_numbers_count_as_numbers() -> None:
    assert size_of(dict.fromkeys(range(100), "ab"), ENOUGH) == 100 * (4 + 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_integer_is_known_by_its_length_and_its_remainder(sign: int) -> None:
    number = sign * (10**5_000 + 7)
    assert answer_text(number) == f"i{number.bit_length()}:{number % (2**61 - 1)}"


def test_attributes_of_dicts_and_slots_are_read_without_code_of_the_object() -> None:
    class Slotted:
        __slots__ = ("empty", "first")

    class Mixed(Slotted):
        @property
        def second(self) -> int:
            raise AssertionError("foreign code was run")

    item: Any = Mixed()
    item.first, item.other = 1, 2
    assert sorted(stored_attributes(item)) == sorted(stored_attributes(item)) == [("first", 1), ("other", 2)]


def test_every_detector_of_a_lane_sees_its_events_in_order() -> None:
    guard = Guard(Policy.validated({"max_seconds": 5}, ""))
    lane = guard.start(RunInfo("run")).lanes[ROOT_LANE]
    for event in (ModelCall, ToolCall):
        expected = [detector.observe for detector in lane.detectors if event in detector.sees]
        assert list(lane.by_event[event].every) == expected
