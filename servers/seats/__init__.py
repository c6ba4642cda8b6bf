"""Environments with several seats as sessions: `seat_environment` makes the class that is served of a game."""

from servers.seats.environment import SeatEnvironment, SeatState, seat_environment

__all__ = ["SeatEnvironment", "SeatState", "seat_environment"]
