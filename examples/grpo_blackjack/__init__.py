"""A language-model policy learns BlackJack: `ropewalk train --config examples/grpo_blackjack/config.yaml`."""
