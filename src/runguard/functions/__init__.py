"""``guard`` and ``guard_async``: any function that calls a model, checked before every call."""
