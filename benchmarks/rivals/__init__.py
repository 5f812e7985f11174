"""Loop detectors of other agents, written anew from their published behaviour for replay; the LLM judges of some are
left out.

Each file tells product, revision, what is counted and what is done. ``RIVALS`` names every variant: "as shipped" is
what the product does out of the box where that differs from what it promises.
"""

from collections.abc import Callable
from functools import partial

from rivals.browser_use import BrowserUse
from rivals.cline import Cline
from rivals.crewai import CrewAI
from rivals.crush import Crush
from rivals.gemini_cli import GeminiCli
from rivals.goose import Goose
from rivals.openclaw import OpenClaw
from rivals.opencode import OpenCode
from rivals.openhands import OpenHandsSdk, OpenHandsV0
from rivals.qwen_code import QwenCode
from rivals.roo import Roo
from rivals.stella import Stella
from rivals.steps import Detector, Said, Step

__all__ = ["RIVALS", "Detector", "Said", "Step"]

RIVALS: dict[str, Callable[[], Detector]] = {
    "Gemini CLI": GeminiCli,
    "Gemini CLI before 2026-07": partial(GeminiCli, longest=1),
    "Gemini CLI, patterns repaired": partial(GeminiCli, repaired=True),
    "OpenHands SDK": OpenHandsSdk,
    "OpenHands SDK, thoughts aside": partial(OpenHandsSdk, thoughts=False),
    "OpenHands V0, headless": OpenHandsV0,
    "OpenHands V0, interactive": partial(OpenHandsV0, headless=False),
    "goose, as shipped": Goose,
    "goose, limit 3": partial(Goose, 3),
    "goose, limit 5": partial(Goose, 5),
    "Roo Code": Roo,
    "Roo Code, repetition only": partial(Roo, mistakes=False),
    "opencode, as shipped": OpenCode,
    "opencode, as documented": partial(OpenCode, across_messages=True),
    "Cline": Cline,
    "Cline CLI": partial(Cline, 3),
    "Cline, change 12543": partial(Cline, reads_answers=True),
    "Crush": Crush,
    "OpenClaw, as shipped": OpenClaw,
    "OpenClaw, enabled": partial(OpenClaw, enabled=True),
    "Qwen Code": QwenCode,
    "Qwen Code, heuristics on": partial(QwenCode, heuristics=True),
    "stella": Stella,
    "crewAI": CrewAI,
    "crewAI, no step cap": partial(CrewAI, None),
    "browser-use": BrowserUse,
    "browser-use, actions only": partial(BrowserUse, pages=False),
}
