"""The ``runguard`` command. The module of a command is imported when the command runs."""
