"""One module per command, each with `run(arguments) -> exit code`; `arguments` holds their flags and imports no library."""
