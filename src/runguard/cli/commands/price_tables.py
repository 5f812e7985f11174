"""The price list in use: its date, its age, and its update."""

import time
from datetime import UTC, datetime
from typing import Any, Final

from runguard.cli.commands.command import CommandError
from runguard.pricing.price_list import PricesSource, price_list
from runguard.pricing.update import NoUpdateError, write_update

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
    """Write a table from the installed genai-prices; says where, or that the one in use is as new."""
    try:
        written = write_update()
    except NoUpdateError as error:
        raise CommandError(str(error)) from None
    return {"written": written is not None, "file": str(written[0]) if written is not None else None}
