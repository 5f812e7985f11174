"""What the clerk's model says without a key: it answers about an invoice, and it never gives up on a scan."""

import re

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from runguard.testing import ScriptedModel, call, text


def scripted() -> ScriptedModel:
    return ScriptedModel(_next, model="gemini-2.5-flash")  # the name decides the price


def _next(number: int, request: LlmRequest) -> types.Part:
    parts = [part for content in request.contents for part in content.parts or []]
    asked = max(index for index, part in enumerate(parts) if part.text and not part.function_response)
    answers = [part.function_response for part in parts[asked:] if part.function_response]
    if "scan" in (parts[asked].text or ""):
        return call("parse_scan", page=1, hint=f"attempt {len(answers) + 1}")
    if answers:
        return text(f"The total is {(answers[-1].response or {}).get('total')}.")
    found = re.search(r"\d+", parts[asked].text or "")
    return (
        call("read_invoice", number=int(found[0]))
        if found
        else text("Ask me: Extract invoice 7. Or: Extract the scan.")
    )
