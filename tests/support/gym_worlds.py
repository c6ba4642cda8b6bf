"""Gymnasium environments with spaces that its own small ones lack: a dict of everything, a picture."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

MIXED = spaces.Dict(
    {
        "text": spaces.Text(8),
        "parts": spaces.Tuple(
            [spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3]), spaces.Discrete(3, start=-1)]
        ),
        "several": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32)),
        "either": spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,), np.float64)]),
    }
)


class World(gymnasium.Env[Any, Any]):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 1}

    def __init__(
        self, space: spaces.Space[Any], force: type[np.generic] = np.float32, render_mode: str | None = None
    ) -> None:
        self.observation_space = space
        self.action_space = spaces.Dict({"move": spaces.Discrete(2), "force": spaces.Box(0, 1, (2,), force)})
        self.render_mode = render_mode
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._left = (options or {}).get("steps", 5)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        info = {"left": np.int64(self._left), "secret": object()}
        return self.observation_space.sample(), float(action["force"].sum()), False, self._left <= 0, info

    def render(self) -> Any:
        return np.full((4, 6, 3), self._left, np.uint8)


gymnasium.register("Mixed-v0", World, kwargs={"space": MIXED})
gymnasium.register("Bytes-v0", World, kwargs={"space": spaces.Discrete(2), "force": np.uint8})
gymnasium.register("Picture-v0", World, kwargs={"space": spaces.Box(0, 255, (84, 84, 4), np.uint8)})
