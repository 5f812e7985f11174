"""One module per command of ``runguard``; each exposes ``command`` and is loaded when it is called."""
