"""browser-use (85ddbfed, 2026-08-19): counts similar actions and unchanged pages, and advises; it never refuses or
stops.

Advice is given while one action makes up 5 of the last 20, or when 5 pages in a row are the same (here: answers).
Searches are compared by their set of words, clicks by the element, inputs by element and text, scrolls by direction and
element, all else by its arguments.
"""

import re
from collections import Counter, deque
from collections.abc import Hashable
from typing import Any

from rivals.steps import ANSWERS, Row, Said, Step, answer_of, in_order

WINDOW, SIMILAR, UNCHANGED = 20, 5, 5


class BrowserUse:
    def __init__(self, *, pages: bool = True) -> None:
        self.pages = pages
        self._recent: deque[Hashable] = deque(maxlen=WINDOW)
        self._page = Row()

    def feed(self, step: Step) -> Said:
        if step["kind"] == "tool_call":
            self._recent.append(_action(step.get("tool"), step.get("args")))
            most = max(Counter(self._recent).values())
            if most >= SIMILAR:
                return "nudge", f"{most} of the last {len(self._recent)} actions are similar"
        elif step["kind"] in ANSWERS and self.pages:
            unchanged = self._page.add(answer_of(step)) - 1
            if unchanged >= UNCHANGED:
                return "nudge", f"{unchanged} actions changed nothing"
        return None


def _action(tool: Any, args: Any) -> Hashable:
    if not isinstance(args, dict):
        return tool, in_order(args)
    if tool == "search":
        return tool, frozenset(re.sub(r"[^\w\s]", " ", str(args.get("query", "")).lower()).split())
    if tool == "click":
        return tool, str(args.get("index"))
    if tool == "input":
        return tool, str(args.get("index")), str(args.get("text", "")).strip().lower()
    if tool == "scroll":
        return tool, str(args.get("down", True)), str(args.get("index"))
    return tool, in_order({name: value for name, value in args.items() if value is not None})
