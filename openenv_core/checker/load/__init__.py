"""Many sessions, and many episodes after each other."""
