"""What an interpreter for code that nobody has read costs: its start, an execution, its memory, and its end."""
