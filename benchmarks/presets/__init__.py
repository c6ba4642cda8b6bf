"""Trains the BlackJack example with each preset of `algorithm`."""
