"""The reason of a stop as text, and the command that lets the run continue. Pure."""

from decimal import Decimal
from typing import Any, Final

from runguard.console.hints import hint
from runguard.core.money import UNITS, amount_text, nanos
from runguard.view.records import dollars, whole, word

# Rules that count repetitions; every other rule has its own reason.
OF_REPETITION: Final = frozenset(
    {
        "repetition",
        "no_news",
        "same_call",
        "cycle",
        "stall",
        "tool_failures",
        "handoff",
        "talk",
        "reentry",
        "polling",
        "empty",
    }
)
# rules without a count
WITHOUT_A_COUNT: Final = frozenset({"kill_switch", "guard_error", "policy_error", "unpriced"})


def why_of(trip: dict[str, Any]) -> tuple[str, ...]:
    """Return the reason of a stop; empty if the reason is a repetition."""
    rule = word(trip.get("rule"))
    if rule in OF_REPETITION:
        return ()
    if rule == "kill_switch":
        scope = word(trip.get("scope_id"))
        detail = _detail(trip)
        return (f"{'everything' if scope == 'all' else scope} was {detail}" if detail else word(trip.get("message")),)
    if rule == "budget" and (reason := _of_budget(trip)):
        return reason
    if rule in WITHOUT_A_COUNT or rule == "budget":
        return (_detail(trip) or word(trip.get("message")),)
    observed, limit = counted(trip.get("unit"), trip.get("observed")), counted(trip.get("unit"), trip.get("limit"))
    return (
        (f"The rule “{rule}” counted {observed}; its limit is {limit}.",)
        if observed and limit
        else (word(trip.get("message")),)
    )


def _of_budget(trip: dict[str, Any]) -> tuple[str, ...]:
    listed = trip.get("evidence")
    evidence = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    spent, reserved, wanted, limit = (
        counted(evidence.get("unit"), evidence.get(name)) for name in ("spent", "reserved", "wanted", "limit")
    )
    if not (spent and reserved and wanted and limit):
        return ()
    return (
        f"{word(trip.get('scope_id'))} had spent {spent} and reserved {reserved} of its {limit}.",
        f"This call could have cost {wanted}, more than was left.",
    )


def counted(unit: Any, value: Any) -> str:
    """Format ``$0.028``, ``1,200 tokens``, ``3 equal failures``; "" if the value is not a number."""
    amount = dollars(value)
    if amount is None:
        return ""
    if unit in UNITS:
        number = nanos(amount) if unit == "usd" else whole(int(amount))
        return amount_text(UNITS.index(unit), number) if number is not None else ""
    return f"{_plain(amount)} {word(unit)}".rstrip()


def _plain(amount: Decimal) -> str:
    return f"{amount:,f}".rstrip("0").rstrip(".") if "." in f"{amount:f}" else f"{amount:,f}"


def _detail(trip: dict[str, Any]) -> str:
    """Return the part of the message between the scope and the agents: the text of the deciding rule or operator."""
    message, scope, made = word(trip.get("message")), word(trip.get("scope_id")), whole(trip.get("model_calls"))
    begin, end = message.find(f": {scope}, "), message.rfind(f"; {made} model call")
    if not scope or begin < 0 or end < 0:
        return ""
    path = trip.get("agent_path")
    where = f" in {'→'.join(map(str, path))}" if isinstance(path, list) and path else ""
    return message[begin + len(scope) + 4 : end].removesuffix(where)


def command_of(trip: dict[str, Any], store: str | None) -> str:
    """Return the shell command that lifts the stop or doubles the limit; "" if there is none."""
    scope, unit, limit = word(trip.get("scope_id")), word(trip.get("unit")), dollars(trip.get("limit"))
    if trip.get("rule") == "kill_switch" and scope:
        return hint("resume", scope, store)
    if trip.get("rule") == "budget" and scope and trip.get("scope") != "run" and unit in UNITS and limit:
        return hint("extend", scope, store, f" --{unit} {limit:f}")
    return ""
