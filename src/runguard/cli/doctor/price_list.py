"""Check of the price list: which one is used, and how old it is."""

from runguard.cli.commands.price_tables import OLD_DAYS, REFRESH, list_in_use
from runguard.cli.doctor.installation import CheckResult
from runguard.policy.settings import Policy
from runguard.pricing.price_table import updated_table


def list_line(policy: Policy) -> CheckResult:
    """Report the price list in use, and warn when it is old."""
    if policy.prices_source == "table":
        try:
            updated_table()
        except ValueError as error:
            return CheckResult("price list", "warning", str(error), "runguard prices --update writes a new one")
    used = list_in_use(policy.prices_source)
    found = f"{used['source']}, {used['days_old']} days old"
    if not used["old"]:
        return CheckResult("price list", "ok", found)
    do = REFRESH if policy.prices_source == "table" else "pip install -U genai-prices"
    return CheckResult("price list", "warning", f"{found}: prices may have changed (the limit is {OLD_DAYS} days)", do)
