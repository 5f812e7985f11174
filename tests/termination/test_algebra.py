"""Conditions joined with & and |, by example and by property."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.termination import (
    AndTerminationCondition,
    CostTermination,
    ExternalTermination,
    FunctionalTermination,
    FunctionCallTermination,
    HandoffTermination,
    MaxIterationsTermination,
    MaxMessageTermination,
    OrTerminationCondition,
    RuleTermination,
    StateTermination,
    TerminatedError,
    TerminationCondition,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
)
from tests.kit.conditions import (
    PRICES,
    OwnTermination,
    answer,
    call,
    does,
    fires_at,
    say,
    took,
    top_level_function,
)

# ---- the algebra, by example ----------------------------------------------------------------------------------------


def test_autogen_defect_chains_are_flat_and_mixtures_nest() -> None:
    a, b, c, d = (TextMentionTermination(letter) for letter in "abcd")
    assert (a | b | c).conditions == (a, b, c)
    assert (a | (b | c)).conditions == (a, b, c)
    assert OrTerminationCondition(a | b, c | d).conditions == (a, b, c, d)
    assert (a & b & c).conditions == (a, b, c)
    mixed = (a & b) | c
    assert [type(one) for one in mixed.conditions] == [AndTerminationCondition, TextMentionTermination]


def test_or_tells_all_children_and_joins_the_reasons_of_those_that_fired_now() -> None:
    a, b, count = TextMentionTermination("a"), TextMentionTermination("b"), MaxIterationsTermination(3)
    either = a | b | count
    assert not either.check([say("x"), say("y")])
    result = either.check([say("b a")])
    assert result.reason == "Text 'a' mentioned, Text 'b' mentioned, Maximum of 3 events reached, current count: 3"
    either.reset()
    assert either.check([say("b")]).reason == "Text 'b' mentioned"
    assert (a.terminated, b.terminated) == (False, True)


def test_and_waits_for_the_last_and_keeps_the_order_of_the_children() -> None:
    both = TextMentionTermination("a") & TextMentionTermination("b")
    assert not both.check([say("b")])
    assert (both.terminated, both.reason) == (False, None)
    assert both.check([say("a")]).reason == "Text 'a' mentioned, Text 'b' mentioned"


def test_and_asks_no_child_that_has_fired() -> None:
    asked: list[int] = []

    def once(events: Sequence[Any]) -> bool:
        asked.append(1)
        return True

    both = FunctionalTermination(once) & TextMentionTermination("b")
    for _ in range(3):
        assert not both.check([say("x")])
    assert asked == [1]


def test_a_child_asked_on_its_own_counts_for_its_composites() -> None:
    a, b = TextMentionTermination("a"), TextMentionTermination("b")
    either, both = a | b, a & b
    a.check([say("a")])
    assert (either.terminated, either.reason) == (True, "Text 'a' mentioned")
    assert (both.terminated, both.reason) == (False, None)
    with pytest.raises(TerminatedError):
        either.check([say("b")])
    assert both.check([say("b")]).reason == "Text 'a' mentioned, Text 'b' mentioned"


def test_an_instance_with_itself_is_itself() -> None:
    count = MaxIterationsTermination(3)
    for twice in (count | count, count & count):
        assert twice.conditions == (count,)
        assert fires_at(twice.for_run(), *[[say("x")]] * 4) == 3


def test_reset_resets_everything_within() -> None:
    a, b, count = TextMentionTermination("a"), TextMentionTermination("b"), MaxIterationsTermination(2)
    condition = (a & b) | count
    condition.check([say("a")])
    condition.reset()
    assert not a.terminated
    assert not condition.check([say("b")])
    assert condition.check([say("a")])


def test_the_reason_does_not_change_after_the_end() -> None:
    a, b = TextMentionTermination("a"), TextMentionTermination("b")
    condition = (a | b) & TextMentionTermination("c")
    either = condition.conditions[0]
    condition.check([say("a")])
    b.check([say("b")])  # somebody asks it elsewhere
    assert either.reason == "Text 'a' mentioned"


def test_a_finished_condition_gives_fresh_copies() -> None:
    condition = MaxIterationsTermination(1) | TextMentionTermination("x")
    condition.check([say("x")])
    run = condition.for_run()
    assert not run.terminated
    assert run.check([say("x")])


# ---- the algebra, by chance -----------------------------------------------------------------------------------------


_leaves: list[Callable[[], TerminationCondition]] = [
    lambda: TextMentionTermination("a"),
    lambda: TextMentionTermination("b", sources="boss"),
    lambda: MaxIterationsTermination(3),
    lambda: MaxMessageTermination(2),
    lambda: TokenUsageTermination(max_total=30),
    lambda: TokenUsageTermination(max_completion=6),
    lambda: CostTermination("0.00004", prices=PRICES, model="toy"),
    lambda: FunctionCallTermination("t"),
    lambda: HandoffTermination("boss"),
    lambda: StateTermination("k"),
    lambda: StateTermination("k", [2]),
    lambda: TimeoutTermination(3),
    lambda: RuleTermination("repetition", stop=2),
    lambda: FunctionalTermination(top_level_function),
    lambda: OwnTermination("boss"),
    lambda: ExternalTermination(),
]


_leaf = st.integers(0, len(_leaves) - 1)


_tree = st.recursive(
    _leaf, lambda inner: st.tuples(st.sampled_from("|&"), st.lists(inner, min_size=1, max_size=3)), max_leaves=8
)


_author = st.sampled_from(["a", "boss"])


_event = st.one_of(
    st.builds(lambda text, author: say(text, author=author), st.sampled_from(["", "a", "b", "ab", "zz"]), _author),
    st.builds(
        lambda prompt, output, author, chunk: took(prompt, output, author=author, partial=chunk),
        st.integers(0, 9),
        st.integers(0, 3),
        _author,
        st.booleans(),
    ),
    st.builds(lambda name, n: call(name, n), st.sampled_from(["t", "u"]), st.integers(0, 2)),
    st.builds(lambda name, n: answer(name, n, {"v": 1}), st.sampled_from(["t", "u"]), st.integers(0, 2)),
    st.builds(lambda target: does(transfer_to_agent=target), _author),
    st.builds(lambda value: does(state_delta={"k": value}), st.sampled_from([0, "x", [2]])),
)


_deltas = st.lists(st.lists(_event, max_size=3), min_size=4, max_size=12)  # long enough that many of them fire


Tree = int | tuple[str, list[Any]]


def build(tree: Tree, shared: dict[int, TerminationCondition] | None = None) -> TerminationCondition:
    """The condition; with ``shared``, equal leaves are one instance."""
    if isinstance(tree, int):
        return _leaves[tree]() if shared is None else shared.setdefault(tree, _leaves[tree]())
    kind = OrTerminationCondition if tree[0] == "|" else AndTerminationCondition
    return kind(*(build(inner, shared) for inner in tree[1]))


def play(condition: TerminationCondition, deltas: Sequence[Sequence[Any]]) -> tuple[int | None, str]:
    """When it fires and why; the clock goes on by one with each delta."""
    for number, delta in enumerate(deltas):
        result = condition.check(delta, now=float(number))
        if result:
            assert condition.terminated
            assert condition.reason == result.reason
            return number, result.reason
        assert not condition.terminated
        assert condition.reason is None
    return None, ""


def expected(tree: Tree, deltas: Sequence[Sequence[Any]]) -> tuple[int | None, str]:
    """What must come out, from each leaf played alone: | is the earliest, & the latest."""
    if isinstance(tree, int):
        return play(_leaves[tree]().for_run(now=0), deltas)
    parts = [expected(inner, deltas) for inner in tree[1]]
    moments = [moment for moment, _ in parts if moment is not None]
    if not moments or (tree[0] == "&" and len(moments) < len(parts)):
        return None, ""
    when = min(moments) if tree[0] == "|" else max(moments)
    return when, ", ".join(reason for moment, reason in parts if moment is not None and moment <= when)


def reasons(outcome: tuple[int | None, str]) -> tuple[int | None, set[str]]:
    return outcome[0], set(outcome[1].split(", "))


def mirrored(tree: Tree) -> Tree:
    return tree if isinstance(tree, int) else (tree[0], [mirrored(inner) for inner in reversed(tree[1])])


def regrouped(tree: Tree) -> Tree:
    """(x | y) | z as x | (y | z), everywhere."""
    if isinstance(tree, int):
        return tree
    sign, (first, *rest) = tree[0], [regrouped(inner) for inner in tree[1]]
    return (sign, [first, (sign, rest)]) if rest else (sign, [first])


def nested(tree: Tree) -> TerminationCondition:
    """Built pairwise with the operators."""
    if isinstance(tree, int):
        return build(tree)
    made = [nested(inner) for inner in tree[1]]
    result = made[0]
    for one in made[1:]:
        result = result | one if tree[0] == "|" else result & one
    return result


@given(_tree, _deltas)
def test_or_fires_with_the_first_and_and_with_the_last_of_its_children(tree: Any, deltas: list[list[Any]]) -> None:
    assert play(build(tree).for_run(now=0), deltas) == expected(tree, deltas)


@given(_tree, _deltas)
def test_order_and_grouping_change_nothing_but_the_order_of_reasons(tree: Any, deltas: list[list[Any]]) -> None:
    outcome = reasons(play(build(tree).for_run(now=0), deltas))
    assert reasons(play(build(mirrored(tree)).for_run(now=0), deltas)) == outcome
    assert reasons(play(build(regrouped(tree)).for_run(now=0), deltas)) == outcome
    assert reasons(play(nested(tree).for_run(now=0), deltas)) == outcome


@given(_tree, _deltas)
def test_one_instance_in_many_places_is_told_of_each_delta_once(tree: Any, deltas: list[list[Any]]) -> None:
    assert reasons(play(build(tree, {}).for_run(now=0), deltas)) == reasons(expected(tree, deltas))
    condition = build(tree, {})
    condition.reset(now=0)
    assert reasons(play(condition, deltas)) == reasons(expected(tree, deltas))


@given(_tree, _deltas, st.integers(1, 4))
def test_latching_is_idempotent(tree: Any, deltas: list[list[Any]], times: int) -> None:
    condition = build(tree).for_run(now=0)
    when, reason = play(condition, deltas)
    for _ in range(times if when is not None else 0):
        with pytest.raises(TerminatedError):
            condition.check([say("a")], now=99.0)
        assert (condition.terminated, condition.reason) == (True, reason)


@given(_tree, _deltas, _deltas)
def test_a_reset_forgets_everything(tree: Any, before: list[list[Any]], deltas: list[list[Any]]) -> None:
    condition = build(tree)
    condition.reset(now=0)
    play(condition, before)
    condition.reset(now=0)
    assert play(condition, deltas) == expected(tree, deltas)


@given(_tree, _deltas, _deltas, st.booleans())
def test_copies_for_runs_never_influence_one_another(
    tree: Any, left: list[list[Any]], right: list[list[Any]], are_shared: bool
) -> None:
    condition = build(tree, {} if are_shared else None)
    alone = [play(condition.for_run(now=0), deltas) for deltas in (left, right)]
    runs = [condition.for_run(now=0), condition.for_run(now=0)]
    outcome: list[tuple[int | None, str]] = [(None, ""), (None, "")]
    for number in range(max(len(left), len(right))):
        for side, deltas in enumerate((left, right)):
            if (
                number < len(deltas)
                and not runs[side].terminated
                and (result := runs[side].check(deltas[number], now=float(number)))
            ):
                outcome[side] = number, result.reason
    assert outcome == alone
    assert not condition.terminated


@given(_tree, _deltas)
def test_saved_and_loaded_it_behaves_the_same(tree: Any, deltas: list[list[Any]]) -> None:
    condition = build(tree)
    loaded = TerminationCondition.from_dict(json.loads(json.dumps(condition.to_dict())))
    assert loaded.to_dict() == condition.to_dict()
    assert repr(loaded) == repr(condition)
    assert play(loaded.for_run(now=0), deltas) == play(condition.for_run(now=0), deltas)


@given(_tree, _deltas)
def test_awaiting_is_checking(tree: Any, deltas: list[list[Any]]) -> None:
    async def awaited() -> tuple[int | None, str]:
        condition = build(tree).for_run(now=0)
        for number, delta in enumerate(deltas):
            if (result := await condition(delta, now=float(number))) is not None:
                return number, result.reason
        return None, ""

    assert asyncio.run(awaited()) == play(build(tree).for_run(now=0), deltas)


@given(_tree, _deltas)
def test_how_events_are_cut_into_deltas_does_not_matter(tree: Any, deltas: list[list[Any]]) -> None:
    one_by_one = [[one] for delta in deltas for one in delta]
    with_all = [one for delta in deltas for one in delta]

    def at(parts: Sequence[Sequence[Any]]) -> bool:
        condition = build(tree).for_run(now=0)
        return any(condition.check(part, now=0.0) for part in parts)

    assert at(one_by_one) == at([with_all]) == at(deltas)


@given(_tree)
def test_what_cannot_know_early_never_fires_without_events(tree: Any) -> None:
    condition = build(tree).for_run(now=0)
    condition.count(10**9, 10**9, model="toy")
    for external in condition.leaves():
        if isinstance(external, ExternalTermination):
            external.set()
    if condition.check(now=10.0**6):
        assert condition.knows_early
