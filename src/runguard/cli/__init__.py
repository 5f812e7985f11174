"""The ``runguard`` command."""
