"""Decides: the guard, the state of its runs and lanes, breakers and side effects that happen once."""
