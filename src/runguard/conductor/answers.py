"""What the answers of tools mean: which are failures, which are news, which count."""

import logging
import re
from collections.abc import Callable
from typing import Any, Final

from runguard.conductor.runs import Lane, Run
from runguard.core.events import FAILURES, Answer, Outcome, ToolResults
from runguard.core.identity import answer_text, digest, mask, size_of
from runguard.core.outcomes import MISSING, classify, failure_class, is_unfinished, named_items, says_missing, was_done
from runguard.core.rules.failures import lacks_arguments
from runguard.policy.settings import Policy
from runguard.policy.tool_rules import ToolRule
from runguard.policy.tools import Tools

_log: Final = logging.getLogger("runguard")
# Members bound once: looking one up on its enum costs as much as the rest of a line.
_OK, _EMPTY, _FAILED, _ERROR, _REFUSED = Outcome.OK, Outcome.EMPTY, Outcome.FAILED, Outcome.ERROR, Outcome.REFUSED
# Tools by which an agent writes to itself, answered by a short "noted". They are not work: a thought between two
# failures is not progress.
_NOTES: Final = re.compile(
    r"(?:sequential_?)?think(?:ing)?|(?:log_|record_)?thoughts?|scratchpad|todo_?write|update_?todos?"
    r"|(?:update|write|set|save)_?plan",
    re.IGNORECASE,
)
_NOTE_BYTES: Final = 194
_STATUS_BYTES: Final = 194  # a longer answer is more than a status


class Answers:
    """Reads answers by a policy.

    ``report`` is called when a call that holds a permit of a breaker has an answer, ``settle_once`` when a call of a
    ``once`` tool has ended, ``close_price`` when a call of a tool with a price has an answer.
    """

    def __init__(
        self,
        policy: Policy,
        tools: Tools,
        report: Callable[[Run, Answer, float], None],
        settle_once: Callable[[Run, bytes, bool], None],
        close_price: Callable[[Run, Answer], None],
    ) -> None:
        self._policy, self._tools = policy, tools
        self._report_answer, self._settle_once, self._close_price = report, settle_once, close_price
        self._max_chars = policy.max_tool_result_chars or 0
        self._normalizes = bool(policy.tool_result_normalizer)
        self._counts_unfinished = policy.max_identical_tool_results is not None

    def understand(self, run: Run, lane: Lane, event: ToolResults) -> None:
        """What each answer means and whether it is news."""
        kept: list[Answer] = []
        pairs: list[tuple[bytes, int]] = []
        calls: list[bytes] = []
        agent, context, known = event.agent, lane.context, self._tools.known
        is_plain = True
        for a in event.answers:
            tool = a.tool
            rule = known[tool] if tool in known else self._tools.rule(tool)
            if run.permits:
                self._report_answer(run, a, event.at)
            if run.bills is not None:
                self._close_price(run, a)
            if rule is not None and rule.exempt:
                # a refused call claimed nothing: the claim belongs to another one
                if rule.once and a.outcome is not _REFUSED:
                    self._settle_once(run, a.once or a.call, a.outcome is None and was_done(a.value))
                continue
            kept.append(a)
            if a.outcome is _REFUSED:
                is_plain = False
                if a.counted:
                    calls.append(a.call)
                continue
            if self._max_chars:
                a.chars = size_of(a.value, 2 * self._max_chars)
            raw = a.value
            if rule is not None or self._normalizes:
                a.value = self._normalized(a, rule)
            value = a.value
            outcome: Outcome | None = a.outcome
            if outcome is None:
                outcome, a.failure = classify(raw)
                a.outcome = outcome
            elif outcome is _ERROR and type(raw) is str and says_missing(raw):
                outcome, a.failure = _EMPTY, MISSING  # raised or answered: an item that was looked up is missing
                a.outcome = outcome
            missing = outcome is _EMPTY and a.failure == MISSING
            if missing:
                a.failure = ""
            if outcome in FAILURES:
                event.failures = True
                a.lacks_arguments = lacks_arguments(a.args, answer_text(raw))
                if not a.failure or value is not raw:  # the normalizer decides what identifies a failure, too
                    a.failure = failure_class(answer_text(value))
                if items := named_items(a.args, value, rule.volatile if rule is not None else ()):
                    a.failure = f"{a.failure}\0{items}"
            a.answer, new = lane.book.name(a.call, value, agent)
            size = lane.book.size
            a.size = size if value is raw else 0
            # an answer with fewer characters than the window has tokens needs no second look
            if (
                context is not None
                and (size < 0 or (0 < context.limit < size and size > context.suspicious_chars))
                and not a.chars
            ):
                a.chars = size_of(raw, 8 * context.limit)
            good = outcome is _OK or outcome is _EMPTY
            if self._counts_unfinished and good and (outcome is _EMPTY or a.failure or is_unfinished(raw)):
                a.unfinished = digest(mask(answer_text(value))).hex()
            if rule is not None:
                self._apply_rule(run, lane, event, a, rule, good and not missing)
            if new and good and size < _NOTE_BYTES and _NOTES.fullmatch(tool) is not None:
                a.counted = new = False  # neither news nor a step
                a.is_note = True
            if a.counted:
                calls.append(a.call)
                pairs.append((a.call, a.answer))
                a.is_long = not 0 <= size <= _STATUS_BYTES and not is_unfinished(raw)
            if outcome is not _OK or a.failure or a.chars or not a.counted:
                is_plain = False
            if new:
                event.news = True
                event.progress = event.progress or (good and not a.hands_over and not a.failure)
        event.answers, event.is_plain = kept, is_plain and event.progress
        event.pairs = frozenset(pairs)
        event.calls = frozenset(calls)

    def settle_effects(self, run: Run, event: ToolResults) -> None:
        """Answers from a journal, whose outcome is known: which side effects were done."""
        for a in event.answers:
            if run.bills is not None:
                self._close_price(run, a)
            effect = self._tools.effect_of(a)
            if effect and a.outcome is not _REFUSED:
                self._settle_once(run, effect, a.outcome is _OK or a.outcome is _EMPTY)

    def _apply_rule(self, run: Run, lane: Lane, event: ToolResults, a: Answer, rule: ToolRule, good: bool) -> None:
        a.counted = not (rule.polling or rule.paging)
        if rule.once:
            self._settle_once(run, a.once or a.call, good)
        if good and rule.writes:
            lane.book.forget_pairs()
            event.news = event.progress = True

    def _normalized(self, a: Answer, rule: ToolRule | None) -> object:
        normalizer = self._policy.tool_result_normalizer.get(a.tool)
        value = a.value
        if normalizer is not None:
            try:
                value = normalizer(value)
            except Exception:  # the user's function failed on this answer: the answer itself still identifies
                _log.warning(
                    "runguard.normalizer_failed: tool_result_normalizer[%r] raised; the whole answer is compared",
                    a.tool,
                    exc_info=True,
                )
        if rule is None:
            return value
        if a.outcome is None and rule.failed is not None and _declared_failure(rule.failed, a.value):
            a.outcome = _FAILED
        if rule.volatile and type(value) is dict:
            value = {key: entry for key, entry in value.items() if key not in rule.volatile}
        return value


def _declared_failure(failed: Any, value: object) -> bool:
    if callable(failed):
        try:
            return bool(failed(value))
        except Exception:
            _log.warning(
                "runguard.failed_rule_failed: a tool's `failed` function raised; the answer is judged without it",
                exc_info=True,
            )
            return False
    if type(value) is not dict:
        return False
    for key, wanted in failed.items():
        actual = value.get(key)
        options = wanted if isinstance(wanted, list | tuple) else [wanted]
        if type(actual) in (str, int, float, bool) and actual in options:
            return True
    return False
