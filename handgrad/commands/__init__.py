"""One module per command, each with `run(parsed) -> exit code`. `arguments` holds their flags, and imports no library."""
