"""``python -m runguard``: the same as the ``runguard`` command."""

from runguard.cli.main import main

main(prog_name="runguard")
