"""A PettingZoo environment as a game whose agents are seats."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from random import Random
from types import MappingProxyType, new_class
from typing import Any, ClassVar, Final

import numpy as np
import pettingzoo
from gymnasium import Space

from openenv_core import MultiAgentEnvironment
from openenv_core.adapters.spaces import encodable_info, read_value, write_value

from ..models import PettingZooAction, PettingZooObservation, models_for

_SEEDS: Final = 2**31
"""Seeds of 31 bits are what every library below PettingZoo's environments takes."""

NO_ENDS: Final[Mapping[str, Any]] = MappingProxyType({})
"""The ends of agents after a reset: none."""


class PettingZooEnvironment(MultiAgentEnvironment[PettingZooAction, PettingZooObservation]):
    """A PettingZoo environment, whose agents act in the order of its AEC interface.

    `reset(seed=..., **options)` is PettingZoo's own. An action outside the agent's action space is refused, and the
    agent may try again. Agents that no client plays, and those whose players leave, act at random, within the action
    mask if there is one.

    Attributes:
        MAKE: Makes PettingZoo's environment.
        MODEL: The observation model.
        ACTION_SPACES: By agent.
        OBSERVATION_SPACES: By agent.
    """

    MAKE: ClassVar[Callable[[], Any]]
    MODEL: ClassVar[type[PettingZooObservation]]
    ACTION_SPACES: ClassVar[Mapping[str, Space[Any]]]
    OBSERVATION_SPACES: ClassVar[Mapping[str, Space[Any]]]

    def __init__(self) -> None:
        self._env = type(self).MAKE()

    def reset(self, **options: Any) -> dict[str, PettingZooObservation]:
        """Begin an episode, with PettingZoo's options."""
        self._begin(options)
        return self._observe(first=True)

    def step(self, actions: Mapping[str, PettingZooAction]) -> dict[str, PettingZooObservation]:
        """Take the action of the agent whose turn it is."""
        env = self._env
        ((seat, action),) = actions.items()
        env.step(read_value(self.ACTION_SPACES[seat], action.action))
        seen = self._observe()
        if not all(observation.done for observation in seen.values()):
            while seen[env.agent_selection].done:
                env.step(None)
        return seen

    def check(self, seat: str, action: PettingZooAction) -> None:
        """Refuse what is not in the agent's action space."""
        space = self.ACTION_SPACES[seat]
        try:
            valid = space.contains(read_value(space, action.action))
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"this is no action of {space}: {action.action!r:.200}")

    @property
    def turn(self) -> Sequence[str]:
        """The agent that acts next; at the end the one that PettingZoo removes first."""
        return (self._env.agent_selection,)

    def close(self) -> None:
        """Close PettingZoo's environment."""
        self._env.close()

    def _begin(self, options: Mapping[str, Any]) -> Any:
        return self._env.reset(seed=(self.state.seed or 0) % _SEEDS, options=options or None)

    def _observe(self, first: bool = False) -> dict[str, PettingZooObservation]:
        env = self._env
        seen = {agent: env.observe(agent) for agent in env.agents}
        rewards = None if first else env.rewards
        return self._show(seen, env.infos, rewards, env.terminations, env.truncations)

    def _show(
        self,
        observations: Mapping[str, Any],
        infos: Mapping[str, Any],
        rewards: Mapping[str, Any] | None = None,
        terminations: Mapping[str, Any] = NO_ENDS,
        truncations: Mapping[str, Any] = NO_ENDS,
    ) -> dict[str, PettingZooObservation]:
        """Return what each agent sees, by PettingZoo's values; without rewards after a reset."""
        return {
            agent: self.MODEL(
                seat=agent,
                observation=observation,
                info=encodable_info(infos[agent]),
                reward=None if rewards is None else float(rewards[agent]),
                terminated=bool(terminations.get(agent)),
                truncated=bool(truncations.get(agent)),
            )
            for agent, observation in observations.items()
        }


class ParallelPettingZooEnvironment(PettingZooEnvironment):
    """A parallel PettingZoo environment, whose agents all act at once."""

    def reset(self, **options: Any) -> dict[str, PettingZooObservation]:
        """Begin an episode, with PettingZoo's options."""
        return self._show(*self._begin(options))

    def step(self, actions: Mapping[str, PettingZooAction]) -> dict[str, PettingZooObservation]:
        """Take the actions of all agents."""
        values = {agent: read_value(self.ACTION_SPACES[agent], one.action) for agent, one in actions.items()}
        observations, rewards, terminations, truncations, infos = self._env.step(values)
        return self._show(observations, infos, rewards, terminations, truncations)

    @property
    def turn(self) -> Sequence[str]:
        """All agents."""
        return self.seats


def pettingzoo_environment(
    env_id: str, options: Mapping[str, Any], api: str | None = None
) -> type[PettingZooEnvironment]:
    """Return the class of a PettingZoo environment.

    Args:
        env_id: Its id in PettingZoo's registry, or `module:id`; the module, which registers it, is imported first.
        options: Keyword arguments of `pettingzoo.make`.
        api: "aec" or "parallel"; None: "aec" if the environment is registered as one.

    Raises:
        ConfigurationError: A space of the environment cannot be encoded as JSON.
        pettingzoo.env_registry.exceptions.PettingZooRegistryError: There is no such environment.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module)
    api = api or ("aec" if name in pettingzoo.aec_registry else "parallel")
    make = partial(pettingzoo.make, api, name, **options)
    probe = make()
    try:
        agents = tuple(probe.possible_agents)
        action_spaces = {agent: probe.action_space(agent) for agent in agents}
        observation_spaces = {agent: probe.observation_space(agent) for agent in agents}
    finally:
        probe.close()
    members = {
        "seats": agents,
        "ABSENT": "random",
        "POLICIES": {"random": partial(_act_at_random, action_spaces)},
        "MAKE": staticmethod(make),
        "MODEL": models_for(action_spaces, observation_spaces)[1],
        "ACTION_SPACES": action_spaces,
        "OBSERVATION_SPACES": observation_spaces,
    }
    base = ParallelPettingZooEnvironment if api == "parallel" else PettingZooEnvironment
    return new_class(PettingZooEnvironment.__name__, (base,), exec_body=lambda body: body.update(members))


def _act_at_random(
    spaces: Mapping[str, Space[Any]], observation: PettingZooObservation, rng: Random
) -> PettingZooAction:
    space, seen = spaces[observation.seat], observation.observation
    mask = seen.get("action_mask") if isinstance(seen, dict) else observation.info.get("action_mask")
    space.seed(rng.getrandbits(32))
    action = space.sample() if mask is None else space.sample(np.asarray(mask, np.int8))
    return PettingZooAction(action=write_value(space, action))
