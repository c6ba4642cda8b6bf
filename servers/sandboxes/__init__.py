"""A service that runs sandboxes on this machine and speaks E2B's API (docs/sandboxes.md)."""
