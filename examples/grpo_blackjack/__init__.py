"""A language model learns BlackJack: `ropewalk train --config examples/grpo_blackjack/config.yaml`."""
