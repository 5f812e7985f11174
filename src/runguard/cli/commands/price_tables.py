"""The price list in use: its date, its age, and its update."""

import os
import time
from datetime import UTC, datetime
from typing import Any, Final

from runguard.cli.commands.command import CommandError
from runguard.pricing import genai_source
from runguard.pricing.price_list import PricesSource, price_list
from runguard.pricing.price_table import PriceTable, current_table, updated_path

OLD_DAYS: Final = 90  # providers change prices several times a year
REFRESH: Final = "pip install -U 'runguard-agents[prices]' && runguard prices --update"


def list_in_use(source: PricesSource) -> dict[str, Any]:
    """Name, date and age of the price list that runs use."""
    table = price_list(source)
    if table is None:  # a policy with this source is not valid without the package
        return {"source": None, "date": None, "days_old": None, "old": True}
    today = datetime.fromtimestamp(time.time(), UTC).date()  # noqa: TID251 - how old it is now
    days = max((today - table.date).days, 0)
    return {"source": table.source, "date": table.date.isoformat(), "days_old": days, "old": days > OLD_DAYS}


def update_table() -> dict[str, Any]:
    """Write a table from the installed genai-prices; says where, or that the one in use is as new.

    It reads only the installed package and never uses the network.
    """
    try:
        prices = genai_source.snapshot()
    except ImportError:
        raise CommandError(genai_source.MISSING) from None
    text = genai_source.table_text(prices, genai_source.installed_on())
    if not PriceTable(text).is_newer_than(current_table()):
        return {"written": False, "file": None}
    try:
        path = updated_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # a program that reads meanwhile sees the old table or the new one
    except (OSError, RuntimeError) as error:
        raise CommandError(
            f"the price table cannot be written: {error}; name a file with the variable RUNGUARD_PRICES"
        ) from None
    current_table.cache_clear()
    return {"written": True, "file": str(path)}
