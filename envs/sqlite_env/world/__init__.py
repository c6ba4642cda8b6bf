"""The databases: domains, content and read-only access. Independent of questions."""
