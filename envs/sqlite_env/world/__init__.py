"""The databases: what they are about, what is in them, and how they are read. Nothing here knows a question."""
