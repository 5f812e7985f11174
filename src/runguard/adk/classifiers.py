"""The app's own verdict on a tool's answer.

ADK's logging plugins take a ``tool_result_classifier`` (from ADK 2.13 on) that knows which answers of the app's tools
are failures. Where a plugin of the same app has one, its verdict comes before RunGuard's own rules.
"""

import logging
from typing import Any, Final

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext

from runguard.core.events import Outcome

_log: Final = logging.getLogger("runguard")
_VERDICTS: Final = {"OK": Outcome.OK, "ERROR": Outcome.FAILED}
_failed: Final[set[str]] = set()  # tools whose answer made a classifier raise: logged once each
_FAILED_KEPT: Final = 256


def app_verdict(tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, result: Any) -> Outcome | None:
    """The verdict of the first classifier that has one, or None."""
    for plugin in tool_context._invocation_context.plugin_manager.plugins:
        classify = getattr(plugin, "_tool_result_classifier", None) or getattr(
            getattr(plugin, "config", None), "tool_result_classifier", None
        )
        if classify is None:
            continue
        try:
            verdict = classify(tool=tool, tool_args=tool_args, tool_context=tool_context, result=result)
            status = getattr(verdict, "status", None)
        except Exception as error:
            if tool.name not in _failed and len(_failed) < _FAILED_KEPT:
                _failed.add(tool.name)
                _log.warning(
                    "runguard.classifier_failed: tool_result_classifier raised %s on an answer of %s; RunGuard judges "
                    "such answers by its own rules",
                    type(error).__name__,  # its message may hold the answer
                    tool.name,
                )
            continue
        if type(status) is str and status in _VERDICTS:
            return _VERDICTS[status]
    return None
