"""CartPole's dynamics in plain Python, a very cheap environment for the servers of both packages."""

import math
import random

LIMIT = 500
_TIME_S, _FORCE, _GRAVITY, _POLE, _MASS = 0.02, 10.0, 9.8, 0.05, 1.1


class Pole:
    """A cart with a pole, after Barto, Sutton and Anderson (1983)."""

    def __init__(self) -> None:
        self.at = [0.0, 0.0, 0.0, 0.0]
        self.steps = 0

    def reset(self, seed: int | None = None) -> list[float]:
        """Start near the middle."""
        dice = random.Random(seed)
        self.at = [dice.uniform(-0.05, 0.05) for _ in range(4)]
        self.steps = 0
        return self.at

    def step(self, action: int) -> bool:
        """Push to the left (0) or to the right (1); return whether the episode is over."""
        x, speed, angle, turn = self.at
        cos, sin = math.cos(angle), math.sin(angle)
        push = (_FORCE if action == 1 else -_FORCE) + _POLE * turn * turn * sin
        push /= _MASS
        twist = (_GRAVITY * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / _MASS))
        pull = push - _POLE * twist * cos / _MASS
        self.at = [
            x + _TIME_S * speed,
            speed + _TIME_S * pull,
            angle + _TIME_S * turn,
            turn + _TIME_S * twist,
        ]
        self.steps += 1
        return abs(self.at[0]) > 2.4 or abs(self.at[2]) > 0.209 or self.steps >= LIMIT
