"""The gain of asynchronous training: the same job with max_staleness 0 (synchronous), 1 and 4."""
