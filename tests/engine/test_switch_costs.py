"""Whether a switch to a cheaper model saves money, against the same arithmetic in fractions."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from runguard.engine.downgrade import CachedPrompt, switch_costs
from runguard.pricing.rates import Band, Rates

RATE = st.integers(0, 10**11)  # nano-USD per million tokens
TOKENS = st.integers(0, 10**7)


def by_hand(band: Band, plain: int, cached: int, write: int, output: int) -> int:
    total = plain * band.input + cached * band.cached + write * band.cache_write + output * band.output
    return math.ceil(Fraction(total, 1_000_000))


bands = st.builds(
    lambda i, o, c, w: Band(0, i, o, c, w, i, c, o), i=RATE, o=RATE, c=RATE, w=RATE
)  # text only: audio costs as much


@given(bands, bands, TOKENS, TOKENS, TOKENS, st.fractions(0, 1), st.fractions(0, 1))
def test_a_switch_is_made_only_where_the_call_costs_less_with_the_lost_cache(
    present: Band, other: Band, prompt: int, output: int, last: int, cached_share: Fraction, write_share: Fraction
) -> None:
    read = int(last * cached_share)
    written = int((last - read) * write_share)
    costs = switch_costs(
        Rates([present], "t"), Rates([other], "t"), prompt, output, CachedPrompt("m", last, read, written)
    )
    cached = prompt * read // last if last else 0
    write = min(prompt * written // last, prompt - cached) if last else 0
    assert costs.cached == cached
    assert costs.stay == by_hand(present, prompt - cached - write, cached, write, output)
    assert costs.switch == by_hand(other, prompt - cached - write, 0, cached + write, output)
    assert costs.saves == (costs.switch < costs.stay)


@given(bands, TOKENS, TOKENS, st.integers(1, 10**7))
def test_a_switch_to_the_same_prices_never_saves(band: Band, prompt: int, output: int, last: int) -> None:
    write = max(band.input, band.cached, band.cache_write)
    rates = Rates([band._replace(cache_write=write)], "t")
    assert not switch_costs(rates, rates, prompt, output, CachedPrompt("m", last, last // 2, 0)).saves
    assert not switch_costs(rates, rates, prompt, output).saves
