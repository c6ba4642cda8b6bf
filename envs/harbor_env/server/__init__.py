"""The server of Harbor tasks."""
