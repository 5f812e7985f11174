"""Tokens -> money.

All money is whole nano-USD inside, rounded up once per call; ``Decimal`` only at the edge, ``float`` never.

Prices come from the user (``prices=``), else from a price list: the table of this package, which is made from
genai-prices, or the installed genai-prices itself. The list is loaded when the first price is needed. An unknown price
is never zero: it is ``Unpriced`` with a reason, or the rate the user gave for unknown models.

Not in these sums, because no token count tells them: fees per hour of audio, storage of caches, batch and priority
tariffs.
"""
