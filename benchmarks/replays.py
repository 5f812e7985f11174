"""Recorded runs past RunGuard and past its rivals: when each would first have nudged, refused a call, and stopped.

A run is one line of the neutral JSONL that ``runguard replay`` reads. RunGuard sees it through that command's own
engine, so what is measured here is what a user's replay shows. Open loop: a nudge or a refusal changes nothing of what
follows, so what follows it is judged too harshly.
"""

from dataclasses import dataclass, field
from typing import Any

from rivals.steps import Detector, Step
from runguard.replay.player import Judge, quiet
from runguard.replay.sources import run_of
from runguard.replay.steps import Asked, Faults

Run = dict[str, Any]


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
        if action in ("stop", "ask"):
            self.stop = turn

    @property
    def letter(self) -> str:
        """S stopped (or handed to a human), b refused a call, n nudged, . left alone."""
        return (
            "S" if self.stop is not None else "b" if self.hard is not None else "n" if self.nudge is not None else "."
        )


def turn_tokens(run: Run) -> list[int]:
    """Tokens of each model turn: as recorded, or characters / 4 with the whole history sent again."""
    turns = (step.usage for step in run_of(run, "", Faults()).steps if isinstance(step, Asked))
    return [usage.input + usage.output for usage in turns if usage is not None]


def by_runguard(judge: Judge, run: Run) -> Verdict:
    """A message of the user begins a new run, as on ADK; what the first stop would have ended is not looked at."""
    verdict = Verdict()
    with quiet():
        result = judge.play(run_of(run, "", Faults()))
    for said in result.verdicts:
        if said.action in ("nudge", "block", "stop"):
            about = f" of {said.tool}" if said.tool else ""
            verdict.note(said.turn, said.action, f"{said.rule}, {said.observed:g} {said.unit}{about}")
            if verdict.stop is not None:
                break
    return verdict


def by_rival(detector: Detector, run: Run) -> Verdict:
    verdict = Verdict()
    turn = 0
    for step in rivals_steps(run):
        turn += step["kind"] == "model"
        said = detector.feed(step)
        if said is not None:
            verdict.note(turn, *said)
            if verdict.stop is not None:
                break
    return verdict


def rivals_steps(run: Run) -> list[Step]:
    """The guarded agent's steps: a simulated customer's own tool calls are left out,
    a missing first message is added.
    """
    steps = [step for step in run["steps"] if step["kind"] == "message" or step.get("agent") != "user"]
    if run.get("task") and not any(step["kind"] == "message" and step.get("agent") == "user" for step in steps[:3]):
        steps.insert(0, {"kind": "message", "agent": "user", "text": run["task"]})
    return steps
