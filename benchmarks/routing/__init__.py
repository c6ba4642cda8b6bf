"""What least-loaded routing gains over round robin, and what a routed call costs."""
