"""Budgets for the tests of settings and periods."""

from runguard.core.money import Scope, Window

SOMEONE = Scope(
    "",
    "",
    app="app",
    user="ann",
    session="s1",
    run="r1",
    agent="writer",
    model="gemini-2.5-flash",
    tool="search",
    labels={"team": "blue"},
)


ABSURD_USD = [
    0,
    -1,
    -0.01,
    "0",
    "-1",
    float("nan"),
    float("inf"),
    float("-inf"),
    "NaN",
    "sNaN",
    "Infinity",
    10**9 + 1,
    "1e30",
    "1e999999",
    1e-12,
    "1e-999999",
]


NO_USD: list[object] = [True, False, None, [], {}, "", "five", "1,50", b"1", 1j]


def window(text: str, tz: str) -> Window:
    return Window.parse(text, tz if text == "month" or text[-1] in "dw" else None)
