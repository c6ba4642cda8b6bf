"""What `ropewalk init` copies: each folder is a whole environment, called Place Holder until it gets its own name."""
