"""What commands print: tables, screens and hints."""
