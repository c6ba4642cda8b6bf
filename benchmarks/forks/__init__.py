"""What it costs to fork a session."""
