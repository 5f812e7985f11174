"""What replay says about last answers: the held price and the closing call count in what a stop saves."""

from decimal import Decimal
from typing import Any

from runguard.policy import Policy
from runguard.pricing.rates import Usage
from runguard.replay.player import Judge
from runguard.replay.results import RunResult
from runguard.replay.steps import Asked, RecordedRun, Turn

PRICES = {"m": {"input": 10, "output": 0}}
CALLS, TOKENS = 30, 1_000
NANO = 10_000_000  # of each call
CLOSING = (TOKENS + 1_024) * 10_000  # its prompt with a margin


def judged(**policy: Any) -> RunResult:
    steps: list[Any] = [Turn(1.0, "r")]
    steps += [Asked(2.0 + n, "a", model="m", usage=Usage(TOKENS, 10)) for n in range(CALLS)]
    return Judge(Policy.validated({"prices": PRICES, **policy}, "")).play(RecordedRun("r", steps=iter(steps)))


def test_the_price_of_the_closing_call_is_not_saved() -> None:
    plain, closed = judged(max_model_calls=10), judged(max_model_calls=10, final_answer=True)
    assert (plain.saved.model_calls, plain.saved.nano) == (20, 20 * NANO)
    assert "last_answers" not in plain.to_dict()
    # one call is kept for the answer, so the stop comes one call earlier
    assert (closed.saved.model_calls, closed.saved.nano) == (21 - 1, 21 * NANO - CLOSING)
    (stop,) = [verdict for verdict in closed.verdicts if verdict.action == "stop"]
    assert (stop.turn, stop.after.nano) == (9, 21 * NANO - CLOSING)
    found = closed.to_dict()["last_answers"]
    assert (found["model_calls"], Decimal(found["usd"])) == (1, Decimal(CLOSING) / 10**9)


def test_a_budget_keeps_the_held_price() -> None:
    plain, closed = judged(max_usd="0.20"), judged(max_usd="0.20", final_answer=True)
    stops = [[v.turn for v in result.verdicts if v.action == "stop"] for result in (plain, closed)]
    held = 2 * TOKENS + 1_024  # tokens of a prompt twice as large, with a margin
    assert stops == [[20], [(20_000 - held) // TOKENS]]
    assert closed.saved.nano == (CALLS - stops[1][0]) * NANO - CLOSING


def test_a_run_that_is_not_stopped_gives_no_last_answer() -> None:
    result = judged(max_usd=10, final_answer=True)
    assert (result.saved.nano, result.last_answers.model_calls, result.nano) == (0, 0, CALLS * NANO)
