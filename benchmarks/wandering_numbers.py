"""Made-up loops whose answers differ in their numbers alone, and work whose numbers move for a reason."""

from random import Random

from shapes import Shapes, Steps, page, turn, work

LOOPS = Shapes()
HEALTHY = Shapes()
_LONG_EDIT = {"path": "a.py", "text": page("the same edit")}


def _score(n: int) -> float:
    return round(2.35 + Random(n).random() / 20, 4)


# ---- loops ----------------------------------------------------------------------------------------------------------


@LOOPS.of("wandering numbers")
def validation_whose_scores_wander() -> Steps:
    for n in range(70):
        yield from turn(("validate", {"model": "best"}, f"validation done, score {_score(n)}, loss {_score(n + 99)}"))


@LOOPS.of("wandering numbers")
def one_long_edit_again_and_again() -> Steps:
    for n in range(33):
        yield from turn(("edit", _LONG_EDIT, f"edited, the window shows lines {17 * n % 29} to {17 * n % 29 + 100}"))


@LOOPS.of("wandering numbers")
def long_query_whose_cost_wanders() -> Steps:
    for n in range(30):
        answer = {"rows": [], "scanned": Random(n).randrange(9_000), "shards": Random(n).randrange(30)}
        yield from turn(("sql", {"query": page("select")}, answer))


@LOOPS.of("wandering numbers")
def six_calls_in_turn_whose_numbers_wander() -> Steps:
    tools = ["load", "scale", "split", "train", "score", "report"]
    for n in range(90):
        yield from turn((tools[n % 6], {}, f"{tools[n % 6]} is done, value {_score(n)}"))


@LOOPS.of("wandering numbers")
def two_calls_in_turn_whose_numbers_wander() -> Steps:
    for n in range(90):
        tool = ["measure", "adjust"][n % 2]
        yield from turn((tool, {"axis": "x"}, {"state": tool, "offset": _score(n)}))


# ---- look-alikes ----------------------------------------------------------------------------------------------------


@HEALTHY.of("polling with progress")
def load_watched_until_it_falls() -> Steps:
    for n in range(15):
        load = Random(n).randrange(80, 99) if n < 14 else 12
        yield from turn(("cpu_load", {"host": "a"}, f"load is {load} percent"))
    yield from work(2)


@HEALTHY.of("polling with progress")
def loss_that_falls_with_every_step() -> Steps:
    for n in range(30):
        yield from turn(("train_step", {"size": 8}, f"loss {10 / (n + 1):.4f} after {n + 1} steps"))


@HEALTHY.of("polling with progress")
def long_query_whose_count_grows() -> Steps:
    for n in range(18):
        yield from turn(("sql", {"query": page("count")}, {"count": 10 * n, "node": Random(n).randrange(5)}))


@HEALTHY.of("polling with progress")
def two_jobs_watched_in_turn_whose_percentages_grow() -> Steps:
    for n in range(40):
        yield from turn(("check_job", {"id": "ab"[n % 2]}, {"state": "running", "percent": n * 2}))


@HEALTHY.of("samples")
def thirty_throws_of_a_die() -> Steps:
    for n in range(30):
        yield from turn(("roll_die", {"sides": 20}, f"rolled {Random(n).randrange(20)}"))


@HEALTHY.of("samples")
def forty_moves_in_a_game_of_numbers() -> Steps:
    for n in range(40):
        rows = [[Random(4 * n + k).randrange(9) for k in range(4)] for _ in range(4)]
        yield from turn(("move", {"to": "left"}, {"board": rows}))


@HEALTHY.of("samples")
def best_of_ten_results_of_one_long_prompt() -> Steps:
    for n in range(10):
        yield from turn(("generate", {"prompt": page("a picture")}, f"picture made, quality {_score(n)}"))
    yield from work(2)


@HEALTHY.of("samples")
def two_sensors_read_in_turn() -> Steps:
    for n in range(24):
        yield from turn(("read_sensor", {"name": "ab"[n % 2]}, {"celsius": _score(n)}))
    yield from work(2)


@HEALTHY.of("edit-test-edit")
def long_edit_of_one_place_between_runs() -> Steps:
    for n in range(14):
        yield from turn(("edit", _LONG_EDIT, f"edited, {100 - n} lines"))
        yield from turn(("run", {"seed": n}, f"score {_score(n)} with seed {n}"))
