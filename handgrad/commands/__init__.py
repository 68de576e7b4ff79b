"""One module per command, each with `run(arguments) -> exit code`; `arguments` holds what they share."""
