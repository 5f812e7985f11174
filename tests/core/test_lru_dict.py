"""``LruDict`` keeps the entries that were set last, whichever way they are set."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from runguard.core.identity import LruDict

STEP = st.tuples(st.sampled_from(["set", "default", "again", "pop"]), st.integers(0, 8), st.integers())


@given(st.integers(1, 5), st.lists(STEP, max_size=40))
def test_it_is_a_dict_without_its_oldest_entries(most: int, steps: list[tuple[str, int, int]]) -> None:
    kept, model = LruDict[int, int](most), OrderedDict[int, int]()
    for what, key, value in steps:
        if what == "set":
            kept[key] = model[key] = value
            model.move_to_end(key)
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
