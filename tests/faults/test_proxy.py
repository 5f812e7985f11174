"""A proxy between the ledger and a real server that delays, cuts, truncates and duplicates what either side sends.

With ``on_outage="closed"`` the cap holds all the time. What was spent is booked once ``flush`` says so. When the faults
end, the ledger works again, nothing stays held, and the books agree with the calls that reached the models.
``RUNGUARD_FAULTS_SEED`` chooses another schedule.
"""

import os
import time
from typing import Any

import pytest

from runguard.core.money import NOTHING
from runguard.ledger import write_queue as fact_writer
from runguard.ledger import write_queue as store_link
from tests.kit.proxy import FAULTS, Chaos, Proxy

from .crew import CALL_NANO, Crew, account

SEED = os.environ.get("RUNGUARD_FAULTS_SEED", "1")
TIMEOUT_S = 0.25
on_servers = pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)


@pytest.fixture(autouse=True)
def _short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage the ledger asks nothing for a second; here it is a moment,
    so that more faults fit into the test.
    """
    monkeypatch.setattr(store_link, "_REST_S", 0.02)
    monkeypatch.setattr(fact_writer, "_BACKOFF_S", (0.01, 0.02, 0.05))


async def attack(place: Any, chaos: Chaos, seconds: float, cap: int) -> None:
    place.connect().close()  # the schema is made once, without faults
    proxy, url = Proxy.before(place.url, chaos)
    share, chaos.share = chaos.share, 0.0
    crew = Crew(url, cap, store_timeout=TIMEOUT_S, on_outage="closed")
    chaos.share = share
    end = time.monotonic() + seconds
    await crew.work(lambda: time.monotonic() < end)
    during = crew.made
    chaos.share = 0.0
    await crew.recover()
    books = account(place.connect())
    proxy.cut()
    outages = sum(member.plugin.snapshot()["outages"]["closed"] for member in crew.members)
    print(
        f"{place.kind}: {during} of {cap} calls during {sum(chaos.made.values())} faults, {outages} refused "
        f"for an outage; {dict(chaos.made)}"
    )
    assert sum(chaos.made.values()), "no fault was made"
    assert crew.made == cap
    assert (books.spent[2], books.spent[0], books.held) == (cap, cap * CALL_NANO, NOTHING)


@on_servers
@pytest.mark.timeout(900)
async def test_no_mix_of_network_faults_moves_the_cap_or_the_books(place: Any, is_long: bool) -> None:
    chaos = Chaos(f"{SEED} {place.kind}", 0.15, 2 * TIMEOUT_S)
    await attack(place, chaos, 40.0 if is_long else 2.0, 200 if is_long else 25)


@on_servers
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS if os.environ.get("RUNGUARD_FAULTS") == "long" else [])
async def test_no_single_kind_of_network_fault_moves_the_cap_or_the_books(place: Any, fault: str) -> None:
    """``make faults`` plays them; the mix is enough as a sample."""
    await attack(place, Chaos(f"{SEED} {place.kind} {fault}", 0.3, 2 * TIMEOUT_S, (fault,)), 8.0, 100)
