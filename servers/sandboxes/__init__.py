"""A service of sandboxes over this machine, which speaks E2B's API (docs/sandboxes.md)."""
