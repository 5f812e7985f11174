"""``runguard prices``: show what a model costs, the source of the price, and what an unknown price means."""

import sys

import click

from runguard.cli.commands.command import Command, print_json
from runguard.cli.commands.options import json_option, store_option


@click.command(
    "prices",
    cls=Command,
    examples="""
    runguard prices gemini-2.5-flash
    runguard prices 'claude-sonnet-*' openai/gpt-5-mini
    runguard prices
    runguard prices --update
    """,
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--update", is_flag=True, help="First take the prices of the installed genai-prices, for all later runs.")
@store_option
@json_option
def command(models: tuple[str, ...], update: bool, store: str | None, as_json: bool) -> None:
    """Show what models cost and where the price comes from.

    Prices are in dollars per million tokens, under the policy in force here. MODEL is an id as your agents use it, or a
    glob over the known models. Default: the models that the policy names, and those seen in its store. Exit code 0 if
    every model has a price, 1 if one has none, 2 if the policy or the store cannot be used.

    --update writes a price table from the installed genai-prices, if that is newer than the table in use. It does not
    use the network. Exit code 2 if genai-prices is not installed or the table cannot be written.
    """
    from runguard.cli.commands.model_prices import (
        asked_models,
        limits_usd,
        list_in_use,
        price_of,
        print_prices,
        update_table,
    )
    from runguard.cli.commands.policies import policy_here

    updated = update_table() if update else None
    policy = policy_here(store)
    names, notes = asked_models(policy, models) if models or not update else ([], [])
    found = [price_of(policy, name) for name in names]
    ok = all(line["source"] is not None for line in found) and not (models and not found)
    result = {
        "ok": ok,
        "models": found,
        "on_unpriced": policy.model_dump(mode="json", include={"on_unpriced"}, exclude_none=True)["on_unpriced"],
        "limits_usd": limits_usd(policy),
        "list": list_in_use(policy.prices_source),
        "updated": updated,
        "notes": notes,
    }
    if as_json:
        print_json(result)
    else:
        print_prices(result)
    sys.exit(0 if ok else 1)
