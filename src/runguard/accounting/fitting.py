"""What a refused call could still be made with: a shorter answer, or what is left of a cap."""

from dataclasses import replace

from runguard.accounting.charges import Charge, worst_of
from runguard.core.events import ModelCall
from runguard.ledger.base import Refusal
from runguard.pricing.rates import Rates


def affordable_output(charge: Charge, refusal: Refusal, useful: int) -> int | None:
    """The most output the rest can pay, or None when that is less than is ``useful``."""
    usd, tokens, calls = refusal.room
    output = charge.max_output
    if isinstance(charge.rates, Rates) and charge.lines.in_usd:
        output = min(output, charge.rates.affordable_output(usd, charge.input, charge.audio) // charge.candidates)
    output = min(output, (tokens - charge.input) // charge.candidates)
    least = min(useful, charge.max_output)
    if calls < 1 or output < least or output >= charge.max_output or output < 1:
        return None
    return output


def take_the_rest(charge: Charge, event: ModelCall, refusal: Refusal) -> bool:
    """What the call may take is not known, and it asked for the whole cap: what is left will do, if it is as much as
    the call needs at least.
    """
    assert event.bound is not None
    usd, tokens = event.bound
    wanted, room = worst_of(charge), refusal.room
    least_usd, least_tokens = max(event.least[0], 1), max(event.least[1], 1)
    if (
        room[2] < 1
        or (usd is None and wanted[0] > 0 and room[0] < least_usd)
        or (tokens is None and wanted[1] > 0 and room[1] < least_tokens)
    ):
        return False
    charge.bound = (
        (min(wanted[0], room[0]) if usd is None else usd),
        (min(wanted[1], room[1]) if tokens is None else tokens),
    )
    return worst_of(charge) != wanted


def would_refuse(charge: Charge, event: ModelCall, refusal: Refusal, useful: int) -> bool:
    """For a shadow, which cannot wait for other calls' holds nor ask for a shorter answer: what enforcing would come
    to.
    """
    if refusal.wait_helps:
        return False
    if charge.bound is not None:
        return not take_the_rest(replace(charge), event, refusal)
    return affordable_output(charge, refusal, useful) is None
