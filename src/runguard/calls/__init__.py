"""Guarded calls: what adapters for agent frameworks share, and guarded functions."""
