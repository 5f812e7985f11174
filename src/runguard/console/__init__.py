"""Output of commands: tables, screens and hints."""
