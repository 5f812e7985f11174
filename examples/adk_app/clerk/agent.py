"""A clerk that reads invoices, guarded by one line.

    adk web examples/adk_app            then ask it: Extract invoice 7. And: Extract the scan.
    adk run examples/adk_app/clerk

With GOOGLE_API_KEY set it is Gemini that answers, else a script: no key, no network.
"""

import os

from google.adk.agents import LlmAgent

import runguard

from .offline import scripted

runguard.install(max_usd=0.50)  # half a dollar per message, and the loop rules on their defaults


def read_invoice(number: int) -> dict[str, object]:
    """Read an invoice by its number."""
    return {"status": "ok", "number": number, "total": f"{number * 12}.50 EUR"}


def parse_scan(page: int, hint: str) -> dict[str, object]:
    """Parse one page of a scanned document. A hint may help."""
    # a failure that looks like success: no exception, just a status
    return {"status": "partial_parse_error", "data": None}


root_agent = LlmAgent(
    name="clerk",
    model="gemini-2.5-flash" if os.environ.get("GOOGLE_API_KEY") else scripted(),
    description="Reads invoices.",
    instruction="Extract what the user asks for. Use read_invoice for numbers and parse_scan for scans.",
    tools=[read_invoice, parse_scan],
)
