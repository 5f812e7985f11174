"""What to expect of a model: its context window, its longest answer, its typical answer."""

import logging
from typing import Final

from runguard.accounting.charges import Charge
from runguard.policy.settings import Policy
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Usage

_log: Final = logging.getLogger("runguard")
ASSUMED_OUTPUT: Final = 65_536  # of a model whose limit is unknown
_TYPICAL_OUTPUT: Final = 1_024  # of a call that was cut off, before any of its kind was seen to end
_MODELS_KEPT: Final = 1_024


class Expectations:
    """Limits from the policy and the price book, and what was learned from the answers so far."""

    def __init__(self, policy: Policy, pricing: Pricing) -> None:
        self._policy, self._pricing = policy, pricing
        self._typical: dict[str, int] = {}
        self._logged: set[str] = set()

    def context_limit(self, model: str, *, quiet: bool = False) -> int | None:
        """How many input tokens a request may have: the policy's limit, or the model's window; None if unknown.

        ``quiet``: do not log that it is unknown.
        """
        headroom = self._policy.context_headroom
        if self._policy.max_context_tokens is not None:
            return self._policy.max_context_tokens - headroom
        window = self._pricing.limits(model)[0]
        if window is not None:
            return max(window - headroom, 1)
        if not quiet:
            self._log_once(
                logging.INFO,
                f"window:{model}",
                "runguard.unknown_window: the context window of '%s' is unknown; "
                "set models={'%s': {'context_window': …}}",
                model,
            )
        return None

    def max_output(self, model: str) -> int:
        """How many tokens a model can answer with at most."""
        limit = self._pricing.limits(model)[1]
        if limit is not None:
            return limit
        self._log_once(
            logging.WARNING,
            f"output:{model}",
            "runguard.unknown_output_limit: the output limit of '%s' is unknown, assuming 65,536 tokens; "
            "set models={'%s': {'max_output_tokens': …}}",
            model,
        )
        return ASSUMED_OUTPUT

    def guess(self, charge: Charge, streamed_tokens: int, streaming: bool) -> Usage:
        """An estimate for a call that was sent and never reported its usage: its prompt, and a typical answer."""
        output = streamed_tokens
        if not streaming:
            output = max(output, self.typical(charge.model))
        if charge.max_output:
            output = min(output, charge.max_output * charge.candidates)
        return Usage(input=charge.input, output=output, audio=charge.audio)

    def typical(self, model: str, limit: int | None = None) -> int:
        """The mean size of recent answers of a model, at most ``limit``."""
        output = self._typical.get(model, _TYPICAL_OUTPUT)
        return output if limit is None else min(output, limit)

    def learn(self, model: str, output: int) -> None:
        """Remember the size of a model's answers: the mean of recent ones."""
        typical = self._typical.get(model)
        if typical is None and len(self._typical) >= _MODELS_KEPT:
            return
        self._typical[model] = output if typical is None else (typical * 7 + output) // 8

    def _log_once(self, level: int, mark: str, message: str, model: str) -> None:
        if mark not in self._logged and len(self._logged) < _MODELS_KEPT:
            self._logged.add(mark)
            _log.log(level, message, model, model)
