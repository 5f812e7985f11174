"""Tools that several tests give to their agents."""


def step(q: int) -> dict[str, int]:
    """Makes progress: a new answer to every new argument."""
    return {"done": q}
