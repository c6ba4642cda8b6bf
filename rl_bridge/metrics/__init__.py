"""What a run measures: metrics and where they go, and how each process spends its time."""
