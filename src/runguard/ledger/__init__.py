"""Accounts of money, tokens and calls: reserve, settle, release, read, extend."""
