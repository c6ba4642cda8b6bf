"""The bridge's subcommands of `ropewalk`."""
