"""Recorded runs through RunGuard's own Guard and through other detectors, step by step.

A run is ``{"id", "source", "success", "capped", "task", "steps": [...]}``; a step has ``kind`` (message, model, tool_call, tool_result,
error), ``agent``, ``tool``, ``args``, ``result``, ``text`` and, when known, ``call_id``, ``error``, ``input_tokens``, ``output_tokens``.
Replay is open loop: a nudge or a refusal changes nothing of what follows, so what follows it is judged too harshly.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from runguard.conductor import Guard
from runguard.decision import Action, Decision
from runguard.events import Answer, HandOff, ModelCall, ModelResult, Outcome, RunInfo, ToolCall, ToolResults
from runguard.outcomes import classify
from runguard.policy import Policy

ADK_MODEL_CALLS = 500  # RunConfig.max_llm_calls, which the guard holds for the whole tree
TRANSFER = "transfer_to_agent"
logging.getLogger("runguard").setLevel(logging.CRITICAL)


@dataclass(slots=True)
class Verdict:
    """Model turns made when a detector first nudged, first refused or stopped, and stopped."""

    nudge: int | None = None
    hard: int | None = None
    stop: int | None = None
    story: list[str] = field(default_factory=list)

    def note(self, turn: int, action: str, why: str) -> None:
        """``ask`` hands the run to a human, so unattended it is a stop."""
        self.story.append(f"{action} at turn {turn}: {why}")
        if action == "nudge":
            self.nudge = turn if self.nudge is None else self.nudge
            return
        self.hard = turn if self.hard is None else self.hard
        if action in ("stop", "ask") and self.stop is None:
            self.stop = turn


def steps_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The guarded agent's steps: a simulated customer's own tool calls are left out, a missing first message is added."""
    steps = [s for s in run["steps"] if s["kind"] == "message" or s.get("agent") != "user"]
    if run.get("task") and not any(s["kind"] == "message" and s.get("agent") == "user" for s in steps[:3]):
        steps.insert(0, {"kind": "message", "agent": "user", "text": run["task"]})
    return steps


def turn_tokens(steps: list[dict[str, Any]]) -> list[int]:
    """Tokens of each model turn: as recorded, or characters / 4 with the whole history sent again."""
    history = 0
    turns: list[int] = []
    estimated = False
    for step in steps:
        size = step.get("text_chars") or len(step.get("text") or "")
        if step["kind"] == "tool_call":
            size = len(json.dumps(step.get("args"), default=str))
            if turns and estimated:
                turns[-1] += size // 4
        elif step["kind"] in ("tool_result", "error"):
            result = step.get("result", step.get("text"))
            size = step.get("result_chars") or len(result if isinstance(result, str) else json.dumps(result, default=str))
        elif step["kind"] == "model":
            estimated = step.get("input_tokens") is None
            turns.append((history + size) // 4 if estimated else step["input_tokens"] + (step.get("output_tokens") or 0))
        history += size
    return turns


def by_rival(detector: Any, steps: list[dict[str, Any]]) -> Verdict:
    """``detector.feed(step)`` answers None or ``'<nudge|ask|block|stop>:<why>'``."""
    verdict = Verdict()
    turn = 0
    for step in steps:
        turn += step["kind"] == "model"
        said = detector.feed(step)
        if said:
            verdict.note(turn, *said.split(":", 1))
            if verdict.stop is not None:
                break
    return verdict


def by_runguard(policy: Policy, steps: list[dict[str, Any]]) -> Verdict:
    """What the guard does with these steps; a message of the user begins a new run, as on ADK."""
    return _Replay(policy).play(steps)


@dataclass(slots=True)
class _Open:
    """A call without its answer yet."""

    call_id: str | None
    agent: str
    tool: str
    call: bytes
    batch: int
    refused: bool


class _Replay:
    def __init__(self, policy: Policy) -> None:
        self.guard = Guard(policy)
        self.verdict = Verdict()
        self.run = self.turn = self.now = 0
        self.open: list[_Open] = []
        self.answers: list[Answer] = []
        self.asked_by = (0, "")  # the model turn, and the agent, whose calls self.answers answer

    def play(self, steps: list[dict[str, Any]]) -> Verdict:
        self._begin()
        for step in steps:
            self.now += 1
            kind, agent = step["kind"], step.get("agent") or ""
            if kind == "message" and agent == "user":
                self._answered()
                self._begin()
            elif kind == "model":
                self._model(step, agent)
            elif kind == "tool_call":
                self._call(step, agent)
            elif kind in ("tool_result", "error"):
                self._answer(step)
            if self.verdict.stop is not None:
                return self.verdict
        self._answered()
        return self.verdict

    def _begin(self) -> None:
        self.guard.end(str(self.run))
        self.run += 1
        self.open = []
        self.guard.start(RunInfo(str(self.run), at=self.now, model_call_limit=ADK_MODEL_CALLS))

    def _model(self, step: dict[str, Any], agent: str) -> None:
        self._answered()
        if self.verdict.stop is None:
            self._note(self.guard.check(ModelCall(str(self.run), "", agent, self.now)))
        if self.verdict.stop is None:
            self.turn += 1
            self._note(self.guard.after(ModelResult(str(self.run), "", agent, self.now, step.get("input_tokens"), step.get("output_tokens"))))

    def _call(self, step: dict[str, Any], agent: str) -> None:
        tool, args = str(step.get("tool")), step.get("args")
        if tool == TRANSFER:
            self._note(self.guard.check(HandOff(str(self.run), "", agent, str((args or {}).get("agent_name")), self.now)))
            return
        call = self.guard.fingerprint(tool, args)
        decision = self.guard.check(ToolCall(str(self.run), "", agent, self.now, tool, call, str(self.turn), str(self.now)))
        self._note(decision)
        self.open.append(_Open(step.get("call_id"), agent, tool, call, self.turn, decision.action >= Action.BLOCK))

    def _answer(self, step: dict[str, Any]) -> None:
        asked = next((o for o in self.open if o.call_id == step.get("call_id") and o.tool == str(step.get("tool"))), None)
        if asked is None:
            return  # the record holds no call for it
        self.open.remove(asked)
        if (asked.batch, asked.agent) != self.asked_by:
            self._answered()
            self.asked_by = (asked.batch, asked.agent)
        value = step.get("result", step.get("text"))
        outcome = None
        if asked.refused:
            outcome = Outcome.REFUSED
        elif step["kind"] == "error":  # raised, or no such tool: ADK says so by a hook of its own
            outcome = Outcome.UNKNOWN_TOOL if classify(value)[0] is Outcome.UNKNOWN_TOOL else Outcome.ERROR
        elif step.get("error"):
            outcome = Outcome.FAILED
        # ADK wraps what is no mapping in just this way before anybody sees it.
        self.answers.append(Answer(asked.tool, asked.call, value if isinstance(value, dict) or outcome else {"result": value}, outcome=outcome))

    def _answered(self) -> None:
        """The answers to one model response are one observation."""
        if self.answers:
            batch, agent = self.asked_by
            self._note(self.guard.after(ToolResults(str(self.run), "", agent, self.now, str(batch), self.answers)))
            self.answers = []

    def _note(self, decision: Decision) -> None:
        finding = decision.finding
        if finding is not None and decision.action >= Action.NUDGE and self.verdict.stop is None:
            about = f" of {finding.tool}" if finding.tool else ""
            self.verdict.note(self.turn, decision.action.word, f"{finding.rule}, {finding.observed:g} {finding.unit}{about}")
