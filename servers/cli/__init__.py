"""This package's subcommands of `ropewalk`."""
