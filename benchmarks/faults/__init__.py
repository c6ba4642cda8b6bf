"""What a run survives: processes killed at drawn times, and what each loss costs."""
