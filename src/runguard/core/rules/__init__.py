"""Rules as small pure objects: ``observe(event) -> Finding | None``; constructor arguments are the configuration.

A detector lives in one lane of one run (or, where it says so, in the run as a whole), sees events in order, keeps a
bounded state, reads no clock and does no I/O. It answers with the strongest rung its count has reached; what is done
about it, and whether it is done at all, is the policy's business.
"""
