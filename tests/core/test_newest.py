"""``Newest`` keeps the entries that were added last, whichever way they are added."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from runguard.core.identity import Newest

STEP = st.tuples(st.sampled_from(["set", "default", "again", "pop"]), st.integers(0, 8), st.integers())


@given(st.integers(1, 5), st.lists(STEP, max_size=40))
def test_it_is_a_dict_without_its_oldest_entries(most: int, steps: list[tuple[str, int, int]]) -> None:
    kept, model = Newest[int, int](most), OrderedDict[int, int]()
    for what, key, value in steps:
        if what == "set":
            kept[key] = model[key] = value
        elif what == "default":
            assert kept.setdefault(key, value) == model.setdefault(key, value)
        elif what == "pop":
            assert kept.pop(key, None) == model.pop(key, None)
        elif key in model:
            kept.move_to_end(key)
            model.move_to_end(key)
        while len(model) > most:
            model.popitem(last=False)
        assert list(kept.items()) == list(model.items())
