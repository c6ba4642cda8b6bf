"""GRPO on Kuhn poker by self-play: one tiny policy plays both seats."""
