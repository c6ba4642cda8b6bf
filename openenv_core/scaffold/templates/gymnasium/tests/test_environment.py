"""The models compared with Gymnasium's spaces, and a whole episode through the client."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from gymnasium import Space, spaces

from openenv_core import EpisodeOverError
from openenv_core.errors import EnvironmentFailureError

from ..client import PlaceHolderEnv
from ..models import PlaceHolderAction
from ..server.environment import PlaceHolderEnvironment
from ..server.spaces import from_json, to_json

PARENT = Path(__file__).parents[2]


def test_the_action_model_takes_what_the_action_space_has() -> None:
    """Every action that Gymnasium samples fits the model and converts back unchanged."""
    environment = PlaceHolderEnvironment()
    space = environment.action_space
    for _ in range(50):
        drawn = space.sample()
        action = PlaceHolderAction(action=to_json(drawn))
        assert numpy.array_equal(from_json(space, action.action), drawn)
    environment.close()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2, 3)),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(4),
        spaces.Text(5),
        spaces.Tuple((spaces.Discrete(3), spaces.Dict(speed=spaces.Box(0, 9, (1,))))),
    ],
)
def test_values_of_other_spaces_survive_json(space: Space[Any]) -> None:
    """For every space, `from_json` inverts `to_json`, and invalid values are refused."""
    drawn = space.sample()
    assert to_json(from_json(space, to_json(drawn))) == to_json(drawn)
    with pytest.raises(EnvironmentFailureError):
        from_json(space, {"no": "such value"})


def test_an_episode_goes_through_the_client_as_it_does_in_gymnasium() -> None:
    """The same seed and actions give the same values locally and on a server."""
    environment = PlaceHolderEnvironment()
    with PlaceHolderEnv.from_process(cwd=str(PARENT)) as env:
        local, remote = environment.reset(seed=7), env.reset(seed=7)
        for _ in range(500):
            assert remote.observation == local
            if local.done:
                break
            action = PlaceHolderAction(action=0)
            local, remote = environment.step(action), env.step(action)
    assert local.terminated
    with pytest.raises(EpisodeOverError):
        environment.step(PlaceHolderAction(action=0))
    environment.close()
