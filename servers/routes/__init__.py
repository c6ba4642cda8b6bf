"""Routes translate between the wire and sessions; they decide nothing."""
