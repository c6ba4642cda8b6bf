"""The databases: domains, contents and read-only access. Independent of the questions."""
