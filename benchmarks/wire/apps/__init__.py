"""What the measured servers serve: one trivial environment, written for each of them."""
