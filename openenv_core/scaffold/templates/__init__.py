"""What `ropewalk init` copies: an environment called Place Holder, and what is different in others."""
