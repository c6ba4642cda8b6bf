"""A service of sandboxes over this machine: the reference for the interface of docs/sandboxes.md."""
