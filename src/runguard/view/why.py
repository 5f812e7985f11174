"""Why a stop was decided, in words, and the command that lets things go on. Pure."""

from decimal import Decimal
from typing import Any, Final

from runguard.console.hints import hint
from runguard.core.money import UNITS, amount_text
from runguard.view.records import dollars, to_nanos, whole, word

# Rules that count how often something came again; every other one has a reason of its own.
OF_REPETITION: Final = frozenset(
    {"repetition", "no_news", "same_call", "cycle", "stall", "tool_failures", "handoff", "reentry", "polling", "empty"}
)
# what they observed is that it is so
WITHOUT_A_COUNT: Final = frozenset({"kill_switch", "guard_error", "policy_error", "unpriced"})


def why_of(trip: dict[str, Any]) -> tuple[str, ...]:
    """Nothing for a stop whose reason is what repeated."""
    rule = word(trip.get("rule"))
    if rule in OF_REPETITION:
        return ()
    if rule == "kill_switch":
        scope = word(trip.get("scope_id"))
        said = _detail(trip)
        return (f"{'everything' if scope == 'all' else scope} was {said}" if said else word(trip.get("message")),)
    if rule == "budget" and (told := _of_budget(trip)):
        return told
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
        f"This call could have taken {wanted}: more than was left.",
    )


def counted(unit: Any, value: Any) -> str:
    """``$0.028``, ``1,200 tokens``, ``3 equal failures``; nothing where it cannot be read."""
    amount = dollars(value)
    if amount is None:
        return ""
    if unit in UNITS:
        number = to_nanos(amount) if unit == "usd" else whole(int(amount))
        return amount_text(UNITS.index(unit), number) if number is not None else ""
    return f"{_plain(amount)} {word(unit)}".rstrip()


def _plain(amount: Decimal) -> str:
    return f"{amount:,f}".rstrip("0").rstrip(".") if "." in f"{amount:f}" else f"{amount:,f}"


def _detail(trip: dict[str, Any]) -> str:
    """What stands in the message between the scope and where it was: words of the one who decided."""
    message, scope, made = word(trip.get("message")), word(trip.get("scope_id")), whole(trip.get("model_calls"))
    begin, end = message.find(f": {scope}, "), message.rfind(f"; {made} model call")
    if not scope or begin < 0 or end < 0:
        return ""
    path = trip.get("agent_path")
    where = f" in {'→'.join(map(str, path))}" if isinstance(path, list) and path else ""
    return message[begin + len(scope) + 4 : end].removesuffix(where)


def command_of(trip: dict[str, Any], store: str | None) -> str:
    """For a shell: takes the stop back, or grants as much again as the limit was. Nothing where no command does."""
    scope, unit, limit = word(trip.get("scope_id")), word(trip.get("unit")), dollars(trip.get("limit"))
    if trip.get("rule") == "kill_switch" and scope:
        return hint("resume", scope, store)
    if trip.get("rule") == "budget" and scope and trip.get("scope") != "run" and unit in UNITS and limit:
        return hint("extend", scope, store, f" --{unit} {limit:f}")
    return ""
