"""What each preset of `algorithm` makes of the BlackJack example."""
