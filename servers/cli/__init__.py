"""Subcommands of `ropewalk` for servers."""
