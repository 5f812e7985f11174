"""Values and digests for the tests of fingerprints."""

import gc
import time
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

GENEROUS_S = 0.150  # 50 times the 3 ms that the worst input should cost


def cpu_seconds(work: Callable[[], Any]) -> float:
    """How long it computes, the shorter of two times: the first one may find no memory at hand.

    The garbage collector waits: it walks all that other tests have left behind.
    """
    times = []
    gc.disable()
    try:
        for _ in range(2):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
    finally:
        gc.enable()
    return min(times)


keys = st.text(max_size=8)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)


values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


def cyclic_list() -> Any:
    value: list[Any] = [1]
    value.extend([value, {"again": value}])
    return value
