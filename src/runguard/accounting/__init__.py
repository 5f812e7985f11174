"""The bill: what every model call may cost, what it did cost, and on whose account."""
