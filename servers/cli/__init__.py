"""What this package adds to the command `ropewalk`."""
