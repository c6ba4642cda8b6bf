"""A service of sandboxes on this machine, with E2B's API (docs/sandboxes.md)."""
