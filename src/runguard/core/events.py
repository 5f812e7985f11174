"""What happened, told without any framework: the only thing detectors ever see.

The adapters and the replay readers build these, live or from a recording. ``run`` names the root run, ``lane`` the
strand of it in which things happen one after another: a parallel branch or a nested agent call has a lane of its own,
so strands never mix. ``at`` is seconds, passed in: nothing here reads a clock. Plain slotted classes, because frozen
ones cost four times as much to build and these are built on every hook.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

ROOT_LANE = ""
OTHER_WORDS, FEWER_WORDS = "other", "fewer"
WANDERS, WANDERS_LONG, MOVES = "wanders", "wanders_long", "moves"


class Outcome(StrEnum):
    """How a tool call ended, as far as one answer can tell."""

    OK = "ok"
    EMPTY = "empty"  # nothing there: [], "", "not found"
    FAILED = "failed"  # answered, and the answer is a failure
    ERROR = "error"  # raised
    TIMEOUT = "timeout"
    UNKNOWN_TOOL = "unknown_tool"
    REFUSED = "refused"  # RunGuard's own refusal: an attempt, never an answer


# A prefix of a failure's class: the answer says something else, too, and may be a report that was asked for.
LATE = "late: "
FAILURES = frozenset({Outcome.FAILED, Outcome.ERROR, Outcome.TIMEOUT, Outcome.UNKNOWN_TOOL})


@dataclass(slots=True)
class AgentEntered:
    run: str
    lane: str
    agent: str
    at: float
    depth: int = 0  # delegations made by a model above this agent
    branches: int = 0  # how many branches this agent is about to start at once
    is_task: bool = False  # a task ends by its own call alone: its caller never hears of a refusal
    is_bounded: bool = False  # it works in a loop whose number of rounds the developer has set
    # the agents around it, from that of the lane inwards, where it works in a Runner that no hook sees
    above: tuple[str, ...] = ()


@dataclass(slots=True)
class HandOff:
    run: str
    lane: str
    agent: str
    target: str
    at: float


@dataclass(slots=True)
class ModelCall:
    run: str
    lane: str
    agent: str
    at: float
    model: str = ""
    input_tokens: int = 0  # an upper estimate of the prompt
    audio_tokens: int = 0  # of the prompt
    max_output_tokens: int | None = None  # of each candidate, as the request says; None: whatever the model can
    fixed_output: bool = False  # nothing can lower its output limit: what the rest cannot pay for is refused
    projected_tokens: int | None = None  # the likely size of the prompt
    context_limit: int | None = None  # its highest size; None: unknown
    tool: str = ""  # the tool call it is made in
    charge: Any = None  # what it holds in its accounts, once it was allowed
    around: Any = None  # the charges of guards around it; None: as the context of the running code says
    after_answer: bool = False  # the run has given its answer: a refusal of this call does not stop the run
    # nano-USD and tokens that it may take; None: unknown
    bound: tuple[int | None, int | None] | None = None
    least: tuple[int, int] = (0, 0)  # nano-USD and tokens that must be left for it where ``bound`` is None
    candidates: int = 1  # answers asked for, all of them paid
    no_loop: bool = False  # requested without an event loop: a caller that must wait leaves first
    no_wait: bool = False  # waiting for other calls would keep them from coming back
    number: int = 0  # within its run, where a journal is kept
    asked: int = 0  # identity of the question, 0 if unknown
    request_bytes: int = 0  # size of the request, 0 where unknown
    instead_of: str = ""  # the model that was asked for, where a threshold chose a cheaper one
    stands: bool = False  # its reservation stands as long as its run lives; it may never be made
    cheaper: tuple[str, bool] | None = None  # in replay: the model a threshold would choose, and whether it is new
    is_tool: ClassVar[bool] = False


@dataclass(slots=True)
class ToolPayment(ModelCall):
    """The price of one tool call. It is reserved and settled like the cost of a model call, and is not one."""

    is_tool: ClassVar[bool] = True


@dataclass(slots=True)
class ModelResult:
    run: str
    lane: str
    agent: str
    at: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    model: str = ""
    text_id: int = 0  # name of the words that ended an activation, 0 when the response called tools or said nothing
    is_cut: bool = False  # it hit its output limit
    text: str = ""  # the words that ended an activation, for the detectors to look at; never kept
    new_subject: bool = False  # its words, or those of a worker's report, are about something else than before
    new_item: bool = False  # an earlier text with another number in it


@dataclass(slots=True)
class ToolCall:
    """A call about to be made. ``batch`` is the same for all calls of one model response."""

    run: str
    lane: str
    agent: str
    at: float
    tool: str
    call: bytes  # fingerprint of tool and arguments
    batch: str = ""
    id: str = ""  # the framework's id of the call
    depth: int = 0  # depth the callee would have, when the call delegates to an agent
    once: bytes = b""  # identity of its side effect, of a tool that is declared ``once``


@dataclass(slots=True)
class Answer:
    """One answered call.

    The adapter gives tool, call and value. The guard adds what the value means and then drops it.
    """

    tool: str
    call: bytes
    value: object = None
    id: str = ""
    outcome: Outcome | None = None  # set by the adapter where the value cannot tell: an exception, a refusal
    event_id: str = ""
    answer: int = 0  # name of the value within its lane, volatile parts aside
    # class of the failure, "" when it is none; beside OK: of an answer that asks to try again
    failure: str = ""
    chars: int = 0
    too_large: bool = False  # must not enter the history
    counted: bool = True  # False: a declared polling, paging or exempt tool, which repetition rules leave alone
    args: object = None  # of the call: a failure may name one of them
    once: bytes = b""  # identity of its side effect, of a tool that is declared ``once``
    # identity of an answer that is no acknowledgement; set only under an explicit max_identical_tool_results
    identity: str = ""
    # of a tool that set ``transfer_to_agent``: its answer says who works on, so it is no progress
    hands_over: bool = False
    lacks_arguments: bool = False  # it failed because required arguments did not arrive
    is_long: bool = False  # more than a status: a page, a file, a report
    is_near: bool = False  # its call nearly repeats the one before
    # OTHER_WORDS: it says what the answers before it said; FEWER_WORDS: it only leaves something out; "": it is new
    wording: str = ""
    is_command: bool = False  # its call has one argument, a text of several words; set where it failed
    is_note: bool = False  # an acknowledged plan or thought
    ending: str = ""  # class of the last line of a failure
    reads_alike: bool = False  # a reader cannot tell its call from the one before, which had the same answer
    size: int = 0  # bytes of the value's plain copy, 0 where there is none


@dataclass(slots=True)
class ToolResults:
    """The answers to one model response: one observation, however many calls it made."""

    run: str
    lane: str
    agent: str
    at: float
    batch: str
    answers: list[Answer]
    news: bool = False  # at least one (call, answer) pair never seen in this lane
    progress: bool = False  # at least one of those was no failure and did not ask to try again
    failures: bool = False  # at least one answer is a failure
    calls: frozenset[bytes] = frozenset()  # of the answers that count
    pairs: frozenset[tuple[bytes, int]] = frozenset()  # (call, answer) of those that were not refused
    another_page: bool = False  # in a long row of one call: it shares few words with the answer before
    # WANDERS: it repeats the words of the last answer to this call, and its numbers do not move one way; MOVES: one of
    # them does; WANDERS_LONG: the call has a long argument
    wanders: str = ""
    new_subject: bool = False  # an order, or the report on it, is about something else than those before
    new_item: bool = False  # an earlier order with another number in it
    words: str = ""  # how orders and reports of agents without tools relate to earlier ones: see RepeatedReports
    is_understood: bool = False  # read from a journal: what the answers mean is known, their values are not
    is_plain: bool = False  # progress, and no answer that is empty, a failure, very large, or does not count


@dataclass(slots=True)
class StateChanged:
    """The state of the session has changed, or a node of a graph has given its output, without a tool call."""

    run: str
    lane: str
    agent: str
    at: float
    value: int = 0  # identity of the new values


Event = AgentEntered | HandOff | ModelCall | ModelResult | StateChanged | ToolCall | ToolResults


@dataclass(slots=True)
class RunInfo:
    """Who runs, for whom: what a trip must be able to say."""

    run: str
    app: str = ""
    user: str = ""
    session: str = ""
    invocation: str = ""
    at: float = 0.0
    model_call_limit: int | None = None  # the framework's own limit, now held for the whole tree
    labels: Mapping[str, str] | None = None
    max_usd: int | None = None  # nano-USD; given for this run alone, it replaces the policy's
    max_tokens: int | None = None
    message: str = ""  # of the user, for a look at who writes it; never stored
    is_automatic: bool = False  # a program wrote it: loops go on where the last run of the session has left them
    # nano-USD and tokens that a caller on another server can pay for: they lower the limits of the run
    ceiling: tuple[int | None, int | None] = (None, None)
    # identity of the input and of the agent that it is for, made by ``input_fingerprint``; empty: not known
    input: bytes = b""
