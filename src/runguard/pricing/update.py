"""``runguard prices --update``: a price table from the installed genai-prices, for later processes of this user.

It reads only the installed package and never uses the network.
"""

import os
from pathlib import Path

from runguard.pricing import genai_source
from runguard.pricing.price_table import PriceTable, current_table, updated_path


class NoUpdateError(Exception):
    """No table was written; says why, and what to do."""


def write_update() -> tuple[Path, PriceTable] | None:
    """Write the table if it is newer than the one in use; None when it is not. NoUpdateError when it cannot."""
    try:
        prices = genai_source.snapshot()
    except ImportError:
        raise NoUpdateError(genai_source.MISSING) from None
    text = genai_source.table_text(prices, genai_source.installed_on())
    table = PriceTable(text)
    if not table.is_newer_than(current_table()):
        return None
    try:
        path = updated_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # a program that reads meanwhile sees the old table or the new one
    except (OSError, RuntimeError) as error:
        raise NoUpdateError(
            f"the price table cannot be written: {error}; name a file with the variable RUNGUARD_PRICES"
        ) from None
    current_table.cache_clear()
    return path, table
