"""What asynchrony gains: the same job, synchronous and with bounds on staleness."""
