"""The pure part: events, findings, rules, money and identity. Standard library only; no clock, no I/O, no asyncio."""
