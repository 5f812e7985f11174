"""Qwen Code (QwenLM/qwen-code db051956, 2026-08-22): counts calls, answers aside, within one message of the user, and
stops.

Always on: 5 equal calls in a row; more than 100 calls when one of them was made 6 times; more than 1,000 whatever they
are. Heuristics, off as shipped: one call 6 times anywhere; two calls in turn, 3 rounds; 8 of the last 15 calls only
read, once something else was done; 8 calls in a row of one tool. Its rules on text and on shell commands are left out.
"""

from collections import Counter, deque

from rivals.steps import Row, Said, Step, call_of, is_user

IN_A_ROW, ANYWHERE = 5, 6
MANY, TOO_MANY = 100, 1000
READS, OF_THE_LAST = 8, 15
ONE_TOOL = 8


class QwenCode:
    def __init__(self, *, heuristics: bool = False) -> None:
        self.heuristics = heuristics
        self._begin()

    def _begin(self) -> None:
        self._calls, self._tools = Row(), Row()
        self._times: Counter[tuple[str, str]] = Counter()
        self._most = self._total = 0
        self._reads: deque[bool] = deque(maxlen=OF_THE_LAST)
        self._last_six: deque[tuple[str, str]] = deque(maxlen=6)
        self._did_something = False

    def feed(self, step: Step) -> Said:
        if is_user(step):
            self._begin()
        if step["kind"] != "tool_call":
            return None
        call = call_of(step)
        self._total += 1
        self._times[call] += 1
        self._most = max(self._most, self._times[call])
        if self._calls.add(call) >= IN_A_ROW:
            return "stop", f"{IN_A_ROW} equal calls of {call[0]}"
        if self._total > TOO_MANY or (self._total > MANY and self._most >= ANYWHERE):
            return "stop", f"{self._total} calls"
        return self._guess(call) if self.heuristics else None

    def _guess(self, call: tuple[str, str]) -> Said:
        tool = call[0]
        reads = tool.startswith(("read_", "list_")) or tool == "zoom_image"
        self._did_something |= not reads
        self._reads.append(reads)
        self._last_six.append(call)
        of_one_tool = self._tools.add(tool)
        if self._times[call] >= ANYWHERE:
            return "stop", f"{ANYWHERE} equal calls of {tool}, others between"
        last = list(self._last_six)
        if len(last) == 6 and last[0] != last[1] and last == last[:2] * 3:
            return "stop", "two calls in turn"
        if self._did_something and sum(self._reads) >= READS:
            return "stop", f"{READS} of the last {OF_THE_LAST} calls only read"
        return ("stop", f"{ONE_TOOL} calls of {tool} in a row") if of_one_tool >= ONE_TOOL else None
