"""An environment whose observation is a picture: a white dot on a dark board, moved by the actions."""

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from openenv_core import Action, Environment, Observation, Picture, State
from servers import create_app

SIZE = 24
STEPS = 5


class Move(Action):
    to: Literal["left", "right"]


class Board(Observation):
    frame: Annotated[NDArray[np.uint8], Picture(SIZE, SIZE)]


class Dot(Environment[Move, Board, State]):
    """Moves a dot; the reward is 1 where it reaches the right edge."""

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, *, seed: int | None = None, **options: Any) -> Board:
        self.place, self.steps = (seed or 0) % SIZE, 0
        return Board(frame=self.draw())

    def step(self, action: Move) -> Board:
        self.place = max(0, min(SIZE - 1, self.place + (1 if action.to == "right" else -1)))
        self.steps += 1
        at_edge = self.place == SIZE - 1
        over = at_edge or self.steps == STEPS
        return Board(frame=self.draw(), reward=float(at_edge), done=over, truncated=over and not at_edge)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)

    def draw(self) -> NDArray[np.uint8]:
        """Return the board: dark blue, with the dot in white."""
        frame = np.zeros((SIZE, SIZE, 3), np.uint8)
        frame[..., 2] = 90
        frame[SIZE // 2, self.place] = 255
        return frame


app = create_app(Dot, Move, Board, env_name="dot", max_concurrent_envs=4)
