"""Made-up supervisors: orders that are given again and again in other words, and healthy work through workers."""

from typing import Any

from shapes import Shapes, Steps, page, turn

LOOPS = Shapes()
HEALTHY = Shapes()
_PHRASES = ["Please look at", "Would you check", "Have a look at", "Kindly verify", "Find out about", "I need to know"]
_ASIDES = ["", " once more", " again", " please", " for me", " right now", " today"]
_CALL = ("look_up", {"number": 7}, {"order": 7, "state": "lost"})
_TICKETS = [
    "my printer shows a paper jam although the tray is empty",
    "invoice from march was charged twice on our credit card",
    "cannot log in since you changed the password policy",
    "delivery arrived with broken glass inside the second box",
    "how do we export contacts into another calendar program",
    "the mobile application crashes whenever photos are uploaded",
    "please cancel our subscription before next quarter begins",
    "warranty terms for refurbished laptops are unclear to us",
    "translation of your french manual contains wrong voltage figures",
    "shipping address must move from Lyon to Hamburg this week",
    "battery drains overnight while bluetooth remains disabled",
    "discount code for students is rejected during checkout",
    "two factor codes reach old telephone numbers only",
    "monitor flickers under fluorescent light at high refresh rates",
    "our accountant requires signed copies of all receipts",
    "sound disappears after waking from hibernation mode",
]


def order_text(n: int) -> str:
    return f"{_PHRASES[n % 6]} order 7{_ASIDES[n % 7]} and tell me"


def report_text(n: int) -> str:
    return f"Report {n}: {_PHRASES[n % 6].lower()} it I did, and I see no change"


def chapter(n: int) -> str:
    """A text of its own: four in ten words were in no other chapter."""
    names = ["".join(chr(97 + int(digit)) for digit in str(7919 * (40 * n + k + 1))) for k in range(40)]
    return " ".join(
        f"then the {name} came to {other} again" for name, other in zip(names[::2], names[1::2], strict=True)
    )


def as_tool(order: str, *calls: tuple[str, dict[str, Any], Any], report: str, worker: str = "worker") -> Steps:
    """A supervisor calls a worker as a tool; the worker works in a branch of its own and reports."""
    branch = f"{worker}@1"
    yield {"kind": "model", "agent": "lead", "text": ""}
    yield {"kind": "tool_call", "agent": "lead", "tool": worker, "args": {"request": order}, "call_id": "order"}
    if calls:
        yield from ({**step, "branch": branch} for step in turn(*calls, agent=worker))
    yield {"kind": "model", "agent": worker, "text": report, "branch": branch}
    yield {"kind": "tool_result", "agent": "lead", "tool": worker, "result": {"result": report}, "call_id": "order"}


def planned(order: str, *calls: tuple[str, dict[str, Any], Any], report: str) -> Steps:
    """A planner and a worker take turns, as in a loop of agents or in the nodes of a graph."""
    yield from turn(text=order, agent="planner")
    if calls:
        yield from turn(*calls, agent="worker")
    yield from turn(text=report, agent="worker")


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("orders")
def supervisor_orders_the_same_work_in_new_words() -> Steps:
    for n in range(40):
        yield from as_tool(order_text(n), _CALL, report=report_text(n))


@LOOPS.of("orders")
def supervisor_orders_a_look_at_the_same_long_page() -> Steps:
    for n in range(40):
        yield from as_tool(order_text(n), ("open", {"url": "a"}, page("terms")), report=report_text(n))


@LOOPS.of("orders")
def ordered_answer_with_a_clock() -> Steps:
    for n in range(40):
        answer = {"state": "lost", "checked_at": f"2031-05-04T10:{n:02}:00Z"}
        yield from as_tool(order_text(n), ("look_up", {"number": 7}, answer), report=report_text(n))


@LOOPS.of("orders")
def planner_and_worker_without_end() -> Steps:
    for n in range(40):
        yield from planned(order_text(n), _CALL, report=report_text(n))


@LOOPS.of("orders")
def planner_and_worker_that_makes_two_calls() -> Steps:
    for n in range(40):
        yield from planned(order_text(n), _CALL, ("history", {"of": 7}, page("history")), report=report_text(n))


@LOOPS.of("orders")
def two_workers_ordered_in_turn() -> Steps:
    for n in range(40):
        yield from as_tool(order_text(n), _CALL, report=report_text(n), worker="worker" if n % 2 else "clerk")


@LOOPS.of("orders")
def orders_that_differ_in_a_number_alone() -> Steps:
    for n in range(40):
        yield from as_tool(f"Look at order 7, attempt {n}", _CALL, report="it is lost")


# ---- healthy --------------------------------------------------------------------------------------------------------


@HEALTHY.of("orders")
def state_checked_nine_times_through_a_worker() -> Steps:
    for n in range(10):
        answer = {"order": 7, "state": "waiting" if n < 9 else "delivered"}
        yield from as_tool(order_text(n), ("look_up", {"number": 7}, answer), report=report_text(n))


@HEALTHY.of("orders")
def state_checked_nine_times_in_a_loop_of_agents() -> Steps:
    for n in range(10):
        answer = {"order": 7, "state": "waiting" if n < 9 else "delivered"}
        yield from planned(order_text(n), ("look_up", {"number": 7}, answer), report=report_text(n))


@HEALTHY.of("orders")
def worker_reads_the_categories_for_every_ticket() -> Steps:
    """The worker's only call is always the same; the tickets are not."""
    kinds = ["hardware", "billing", "account", "shipping"]
    for n, ticket in enumerate(_TICKETS):
        yield from as_tool(f"Classify this: {ticket}", ("categories", {}, {"all": kinds}), report=kinds[n % 4])


@HEALTHY.of("orders")
def worker_loads_the_same_document_for_each_part() -> Steps:
    for n in range(24):
        yield from as_tool(f"part {n}", ("load", {"n": 1}, {"document": "text"}), report=f"part {n} is done")


@HEALTHY.of("orders")
def writer_and_critic_with_one_style_guide() -> Steps:
    for n in range(16):
        yield from turn(text=chapter(n), agent="writer")
        yield from turn(("style_guide", {}, page("style")), agent="critic")
        yield from turn(text=f"Chapter {n} follows the guide", agent="critic")


@HEALTHY.of("orders")
def editor_and_tester_as_workers() -> Steps:
    for n in range(16):
        edit = ("edit", {"path": "a.py", "text": f"attempt {n}"}, "ok")
        yield from as_tool(f"Try another change, number {n}", edit, report="changed", worker="editor")
        yield from as_tool(
            "Run the tests", ("run_tests", {}, "1 failed, 11 passed"), report="1 failed", worker="tester"
        )


@HEALTHY.of("orders")
def worker_asks_for_another_item_each_time() -> Steps:
    for n in range(20):
        yield from as_tool(
            f"Look up order {n}", ("look_up", {"number": n}, {"order": n, "state": "lost"}), report="lost"
        )


@HEALTHY.of("orders")
def worker_signs_in_before_each_new_item() -> Steps:
    for n in range(20):
        calls = [("sign_in", {}, {"session": "open"}), ("look_up", {"number": n}, {"order": n, "weight": n * n})]
        yield from as_tool(f"Look up order {n}", *calls, report=f"weighs {n * n}")
