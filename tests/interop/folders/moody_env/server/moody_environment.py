"""What it does is chosen by the action: all that a wire has to carry, and all that can go wrong."""

import math
import os
from pathlib import Path
from typing import Any

from openenv.core.env_server.interfaces import Environment, Transform
from openenv.core.env_server.types import EnvironmentMetadata, State

try:
    from ..models import MoodAction, MoodObservation
except ImportError:
    from models import MoodAction, MoodObservation


class Loud(Transform):
    def __call__(self, observation: MoodObservation) -> MoodObservation:
        observation.metadata = {**observation.metadata, "loud": True}
        return observation


class MoodyEnvironment(Environment[MoodAction, MoodObservation, State]):
    """Has moods."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        # A file that can appear while the server runs: then it cannot be made any more.
        broken = os.environ.get("MOODY_BROKEN")
        if broken and Path(broken).exists():
            raise RuntimeError("no mood to be made")
        super().__init__(transform=Loud(), rubric=lambda action, observation: 0.5)
        self._state = State(episode_id="none", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> MoodObservation:
        self._reset_rubric() if hasattr(self.rubric, "reset") else None
        self._state = State(episode_id=episode_id or "given", step_count=0, seed=seed, options=sorted(kwargs))
        return MoodObservation(said="reset")

    def step(self, action: MoodAction, timeout_s: float | None = None, **kwargs: Any) -> MoodObservation:
        self._state.step_count += 1
        match action.mood:
            case "rubric":
                observation = MoodObservation(said="scored")
                observation.reward = self._apply_rubric(action, observation)
                return self._apply_transform(observation)
            case "int":
                return MoodObservation(said=1, reward=1)
            case "true":
                return MoodObservation(said=True, reward=True)
            case "nan":
                return MoodObservation(said=[math.nan, math.inf], reward=math.nan)
            case "done":
                return MoodObservation(said=None, reward=-1.5, done=True, metadata={"why": "over"})
            case "raise":
                raise RuntimeError("in a bad mood")
            case "told":
                return MoodObservation(said={"timeout_s": timeout_s, "options": sorted(kwargs)})
            case "bytes":
                return MoodObservation(said=b"\xff\x00")
            case mood:
                return MoodObservation(said=mood, metadata=action.metadata)

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="moody", description="Has moods.", version="0.0.1", author="nobody")

    def list_splits(self) -> list[Any]:
        return ["train", "odd", {"name": "t", "type": "test"}]

    def list_tasks(self, split: str) -> list[Any]:
        if split == "nope":
            raise KeyError(split)
        return [{"id": f"{split}-{i}"} for i in range(3)]

    async def num_tasks(self, split: str) -> int:
        return len(self.list_tasks(split))

    def get_task(self, split: str, index: int) -> Any:
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return self.list_tasks(split)[start:stop]
