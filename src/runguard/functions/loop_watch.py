"""Shows the loop rules what a guarded call did."""

import logging
import re
from typing import Any, Final

from runguard.core.events import ROOT_LANE, Answer, ToolResults
from runguard.core.identity import call_fingerprint
from runguard.functions.caller import Caller, GuardedCall
from runguard.providers.messages import Reading, ToolResult

_log: Final = logging.getLogger("runguard")
_PLAIN_NAME: Final = re.compile(r"[\w.:/#@+-]{1,64}")


def watch_loops(call: GuardedCall, reading: Reading, result: Any) -> None:
    caller, run = call.caller, call.state.run
    now = caller.guard.clock()
    answers = _answers(caller, reading, result)
    has_signature = caller.settings.signature is not None or reading.sig is not None
    progress = None if has_signature else call.state.progress  # the user's signature is the whole identity of a step
    with call.state.lock:
        if answers:
            caller.guard.after(ToolResults(run.info.run, ROOT_LANE, caller.name, now, "", answers))
        if progress is None or run.stopped is not None:
            return
        if not reading.results:
            progress.answered(reading.calls)
            return
        results = [(ToolResult(tool, value), args) for tool, args, value in reading.results]
        finding = progress.observe(run.info.run, caller.name, now, results)
        if finding is not None:
            caller.stop_run(call.state, finding)


def _answers(caller: Caller, reading: Reading, result: Any) -> list[Answer]:
    """What the call did, as the loop rule sees it: its signature, or the tools that the model asks for."""
    signature = reading.sig
    if caller.settings.signature is not None:
        try:
            signature = caller.settings.signature(result)
        except Exception:
            _log.warning(
                "runguard.signature_failed: signature raised for '%s'; the call is not checked for loops",
                caller.name,
                exc_info=True,
            )
            return []
        if signature is None:
            return []
    if signature is not None:
        call = call_fingerprint("", {"sig": signature})
        # Anything but a plain name may be content, which must not appear in a trip, a log or an alert.
        plain = signature if isinstance(signature, str) and _PLAIN_NAME.fullmatch(signature) else ""
        return [Answer(plain or f"{caller.name}#{call.hex()[:8]}", call, reading.result)]
    if reading.results:
        return [Answer(tool, _call_id(caller, tool, args), value, args=args) for tool, args, value in reading.results]
    return [Answer(tool, _call_id(caller, tool, args)) for tool, args in reading.calls]


def _call_id(caller: Caller, tool: str, args: Any) -> bytes:
    return call_fingerprint(tool, {} if caller.settings.by == "name" else args)
