"""The `headwise` command: one module a subcommand, imported when it is chosen."""
