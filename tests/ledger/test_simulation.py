"""The store's accounts under seeded crashes, delays, duplicates, partitions and expiry; and defects that must be found.

``make simulate`` plays a million steps; here are a few thousand.
"""

import sqlite3

import pytest

from tests.kit.simulation import simulate

STEPS = 4_000

# A planted defect each: what it breaks, the text of the store's code, and what it becomes.
DEFECTS = {
    "a repeated reservation is made again": ("if known is not None:", "if False:"),
    "a repeated reservation is made again, one account": (
        "NOT EXISTS (SELECT 1 FROM holds WHERE id = :hold) AND",
        "",
    ),
    "a repeated reservation of an ended call is granted": ('ok=known[0] == "open"', "ok=True"),
    "holds do not count": (
        "not fits(b, want)",
        "not fits(Balance(b.key, b.scope, b.window, b.ends, b.caps, b.spent, NOTHING, b.granted), want)",
    ),
    "holds do not count, one account": ("spent_usd + held_usd + :want0", "spent_usd + :want0"),
    "one more than the cap fits": ("not fits(b, want)", "not fits(b, (want[0] - 1, want[1], want[2]))"),
    "one more than the cap fits, one account": ("<= :cap0 + granted_usd", "<= :cap0 + granted_usd + 1"),
    "only the first account is asked": ("for b in balances):", "for b in balances[:1]):"),
    "a closed account is open": ("b.closed or not fits(b, want)", "not fits(b, want)"),
    "a closed account is open, one account": ("closed = 0 AND", ""),
    "only the first account holds": (
        'for key in keys:\n                self._db.execute(\n                    "UPDATE accounts SET held_usd',
        'for key in keys[:1]:\n                self._db.execute(\n                    "UPDATE accounts SET held_usd',
    ),
    "an expired hold is released": (
        "self._book(key, amount, NOTHING, amount, expired=False, now=now)",
        "self._book(key, amount, NOTHING, NOTHING, expired=False, now=now)",
    ),
    "a hold never expires": ("AND expires <= ? LIMIT ?", "AND expires + 9e9 <= ? LIMIT ?"),
    "a late bill is added to the charge": ('state in ("settled", "expired")', 'state in ("settled",)'),
    "a repeated bill is added": ('state in ("settled", "expired")', 'state in ("expired",)'),
    "a bill leaves the hold": ('held = amount if state == "open"', 'held = NOTHING if state == "open"'),
    "a bill leaves the hold open, one account": (
        "\"UPDATE holds SET state = 'settled', updated = ?, usd",
        "\"UPDATE holds SET state = 'open', updated = ?, usd",
    ),
    "a bill without a reservation is lost": (
        '[line.key for line in lines], "unknown", NOTHING',
        '[], "unknown", NOTHING',
    ),
    "a bill after a release is lost": ('if state == "released" and not keys:', "if False:"),
    "a release overtakes its reservation in vain": (
        "\"INSERT OR IGNORE INTO holds VALUES (?, '[]', 'released', ?, ?, 0, 0, 0)\"",
        '"SELECT ?, ?, ?"',
    ),
    "a release takes an expired charge back": (
        "state = 'open' AND expires > ?",
        "state IN ('open', 'expired') AND ? > 0",
    ),
    "a release of an overdue hold is granted": ("AND expires > ?", "AND ? > 0"),
    "a past period is charged": ("now >= line.ends", "now >= line.ends + 1000"),
    "a period is charged before it begins": ("now < line.begins", "now < line.begins - 1000"),
    "an extension replaces the one before": ("granted_usd = granted_usd + ?", "granted_usd = ?"),
    "an extension opens no account": ("int(closed and balance.closed)", "int(balance.closed)"),
    "an extension opens every account": ("int(closed and balance.closed)", "0"),
    "an overrun closes nothing": ("overrun_calls = ?, closed = 1 WHERE", "overrun_calls = ? WHERE"),
}


@pytest.mark.parametrize("seed", range(3))
def test_the_store_keeps_its_rules(seed: int) -> None:
    happened = simulate(STEPS, seed)
    kinds = {"ok", "refused", "stale", "crash", "partition", "duplicate", "lost answer", "too late", "expired"}
    assert kinds <= set(happened), "the simulation does not reach what it is for"


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(1_000, 7) == simulate(1_000, 7) != simulate(1_000, 8)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str) -> None:
    with pytest.raises((AssertionError, sqlite3.IntegrityError)) as found:  # a wrong answer, or the database refuses
        simulate(10 * STEPS, 0, [DEFECTS[defect]])
    assert "simulation of seed 0" in found.value.__notes__[0], "found while it ran"
