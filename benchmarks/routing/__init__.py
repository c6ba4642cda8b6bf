"""The gain of least-loaded routing over round robin, and the cost of a routed call."""
