"""``runguard prices``: what a model costs, from where the price is, and what an unknown one would do."""

import sys
from typing import TYPE_CHECKING, Any

import click

from runguard.cli.commands.command import Command, json_option, print_json, store_option

if TYPE_CHECKING:
    from runguard.policy.settings import Policy


@click.command(
    "prices",
    cls=Command,
    examples="""
    runguard prices gemini-2.5-flash
    runguard prices 'claude-sonnet-*' openai/gpt-5-mini
    runguard prices
    """,
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@store_option
@json_option
def command(models: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Show what models cost, and where the price is from.

    In dollars per million tokens, by the policy in force here. MODEL is an id as your agents name it, or a glob over
    the models that are known. Without it: the models that the policy names, and those seen in its store. Exit code 0
    when every model has a price, 1 when one has none, 2 when the policy or the store cannot be used.
    """
    from runguard.cli.commands.model_prices import asked_models, limits_usd, price_of, print_prices
    from runguard.cli.commands.policies import policy_here

    policy = policy_here(store)
    names, notes = asked_models(policy, models)
    found = [price_of(policy, name) for name in names]
    ok = all(line["source"] is not None for line in found) and not (models and not found)
    told = {
        "ok": ok,
        "models": found,
        "on_unpriced": _fallback(policy),
        "limits_usd": limits_usd(policy),
        "notes": notes,
    }
    if as_json:
        print_json(told)
    else:
        print_prices(told)
    sys.exit(0 if ok else 1)


def _fallback(policy: "Policy") -> Any:
    return (
        policy.on_unpriced
        if isinstance(policy.on_unpriced, str)
        else policy.on_unpriced.model_dump(mode="json", exclude_none=True)
    )
