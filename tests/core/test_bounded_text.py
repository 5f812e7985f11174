"""A dict is told in one go where its keys are short texts, and key by key otherwise. The text is the same."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.core import identity as bounded_text
from runguard.core.identity import MAX_NODES

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=40))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=200), inner, max_size=6), st.tuples(inner, inner)
    ),
    max_leaves=40,
)


def key_by_key(monkeypatch: pytest.MonkeyPatch, value: Any) -> str:
    with monkeypatch.context() as patched:
        patched.setattr(bounded_text, "_STR", frozenset())
        return bounded_text.bounded_text(value)


@settings(max_examples=60)
@given(values)
def test_a_dict_has_one_text(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert key_by_key(patch, value) == bounded_text.bounded_text(value)


@pytest.mark.parametrize("wide", [7, 2_049])
def test_a_budget_that_runs_out_leaves_the_same_text(monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    rows = [{f"k{n % 13}": n, "name": f"row {n} " * 3, "t" * (n % 40): None} for n in range(MAX_NODES // wide + 900)]
    value = {"rows": rows, "wide": dict.fromkeys(map(str, range(wide)), rows[0])}
    assert key_by_key(monkeypatch, value) == bounded_text.bounded_text(value)
