"""The training loops, each on one page, and the machinery that runs them."""
