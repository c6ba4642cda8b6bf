"""What reinforcement learning adds to a policy that was taught by a few traces, beside more of the same traces."""
