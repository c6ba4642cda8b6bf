"""Adapter for PettingZoo: a served environment of several players as an AEC or a parallel environment.

    env = ServedAECEnv("http://localhost:8000")
    env.reset(seed=1)
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, info = env.last()
        env.step(None if terminated or truncated else env.action_space(agent).sample())

One session plays all seats, which are the agents. `envs/pettingzoo_env` serves PettingZoo's own environments.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from pettingzoo import AECEnv, ParallelEnv

from openenv_core.adapters.episode import dict_client, seats_of
from openenv_core.adapters.spaces import Fields
from openenv_core.errors import ConfigurationError, ProtocolError
from openenv_core.types import StepResult

ACTION_MASK = "action_mask"
"""Key of an agent's info: which actions are legal, int8 [n]."""


class _Seen(NamedTuple):
    """What one agent has seen since the last reply."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class _ServedAgents:
    """A session with all seats of a served environment, for either of PettingZoo's interfaces.

    Attributes:
        turn: The agents that act next.
        selected: The first of them; at the end the one that PettingZoo removes first.
        over: Whether all agents have ended.
    """

    def __init__(self, target: str, **options: Any) -> None:
        with dict_client(target, options) as (self._client, schema):
            seats = self.possible_agents = seats_of(schema)
            self._action_fields = {agent: Fields(schema["action"], agent) for agent in seats}
            self._observation_fields = {agent: Fields(schema["observation"], agent) for agent in seats}
        self.metadata: dict[str, Any] = {"name": target, "render_modes": []}
        self.render_mode = None
        self.agents: list[str] = []
        self.turn: list[str] = []
        self.selected, self.over = seats[0], False

    def observation_space(self, agent: str) -> Space[Any]:
        """Return the space of an agent's observations."""
        return self._observation_fields[agent].space

    def action_space(self, agent: str) -> Space[Any]:
        """Return the space of an agent's actions."""
        return self._action_fields[agent].space

    def close(self) -> None:
        """End the session, and the server if this object started it."""
        self._client.close()

    def _begin(self, seed: int | None, options: Mapping[str, Any] | None) -> dict[str, _Seen]:
        """Begin an episode; return what each agent sees."""
        reset_options = dict(options or {}) if seed is None else {"seed": seed, **(options or {})}
        seen = self._read(self._client.reset(seat="all", **reset_options))
        self.agents = [agent for agent in self.possible_agents if agent in seen]
        return seen

    def _act(self, actions: Mapping[str, Any]) -> dict[str, _Seen]:
        """Act for agents whose turn it is; return what agents have seen since."""
        fields = {agent: self._action_fields[agent].write(action) for agent, action in actions.items()}
        return self._read(self._client.step_seats(fields))

    def _read(self, result: StepResult[Any]) -> dict[str, _Seen]:
        metadata = result.metadata or {}
        try:
            self.selected, self.turn, self.over = metadata["seat"], metadata["turn"], result.done
            # An agent that acts after others at once has seen before what it is shown now.
            own = {
                "observation": result.observation,
                "reward": result.reward,
                "terminated": result.terminated,
                "truncated": result.truncated,
            }
            return {
                agent: self._read_seat(agent, seen)
                for agent, seen in {self.selected: own, **metadata["others"]}.items()
            }
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"expected an observation of a game of several seats: {error!r}") from error

    def _read_seat(self, agent: str, seen: Mapping[str, Any]) -> _Seen:
        fields = seen["observation"]
        info = dict(fields["info"]) if isinstance(fields.get("info"), dict) else {}
        if ACTION_MASK in info:
            info[ACTION_MASK] = np.asarray(info[ACTION_MASK], np.int8)
        observation = self._observation_fields[agent].read(fields)
        return _Seen(observation, float(seen["reward"] or 0.0), seen["terminated"], seen["truncated"], info)


class ServedAECEnv(_ServedAgents, AECEnv[str, Any, Any]):
    """A served environment of several players as a PettingZoo `AECEnv`.

    Args:
        target: Target of `openenv_core.make`: a name, a folder, `module:attribute`, a URL or an image.
        options: Further arguments of the client, such as `token`.

    Raises:
        ConfigurationError: The target is not found, has one player, or its models cannot be expressed as spaces.
        ClientError: The server does not answer.
    """

    def __init__(self, target: str, **options: Any) -> None:
        super().__init__(target, **options)
        self.metadata["is_parallelizable"] = False

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode; see `AECEnv.reset`.

        Args:
            seed: Seed of the episode; None leaves it to the server.
            options: Further options of the server's reset.

        Raises:
            ClientError: The server cannot be reached, or refuses the options.
        """
        seen = self._begin(seed, options)
        self._observations = {agent: seen[agent].observation for agent in self.agents}
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self._skip_agent_selection: str | None = None
        self.rewards: dict[str, float] = {}
        self.terminations: dict[str, bool] = {}
        self.truncations: dict[str, bool] = {}
        self.infos: dict[str, dict[str, Any]] = {}
        self._take(seen)

    def step(self, action: Any) -> None:
        """Act for `agent_selection`; see `AECEnv.step`.

        Raises:
            ClientError: The server is lost, or refuses the action.
        """
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._take(self._act({agent: action}))
        if not self.over:
            self._deads_step_first()

    def observe(self, agent: str) -> Any:
        """Return what an agent has seen last."""
        return self._observations[agent]

    def _take(self, seen: Mapping[str, _Seen]) -> None:
        self.agent_selection = self.selected
        for agent in self.agents:
            self.rewards[agent] = 0.0
            if agent in seen:
                self._observations[agent], self.rewards[agent], *ends, self.infos[agent] = seen[agent]
                self.terminations[agent], self.truncations[agent] = ends
        self._accumulate_rewards()


class ServedParallelEnv(_ServedAgents, ParallelEnv[str, Any, Any]):
    """A served environment whose players all act in each step as a PettingZoo `ParallelEnv`.

    Arguments and errors are those of `ServedAECEnv`.
    """

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin an episode; see `ServedAECEnv.reset`."""
        seen = self._begin(seed, options)
        return (
            {agent: seen[agent].observation for agent in self.agents},
            {agent: seen[agent].info for agent in self.agents},
        )

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Act for all agents; see `ParallelEnv.step`.

        Raises:
            ConfigurationError: The agents do not all act once in a step: it is a game of turns.
            ClientError: The server is lost, or refuses an action.
        """
        latest: dict[str, _Seen] = {}
        rewards = dict.fromkeys(self.agents, 0.0)
        waiting = set(self.agents)
        while waiting and not self.over:
            if not waiting.issuperset(self.turn):
                raise ConfigurationError(f"{self.turn} act before {sorted(waiting)}; use ServedAECEnv")
            waiting.difference_update(self.turn)
            seen = self._act({agent: actions[agent] for agent in self.turn})
            latest |= seen
            for each, one in seen.items():
                rewards[each] += one.reward
        before = self.agents
        self.agents = [agent for agent in before if not (latest[agent].terminated or latest[agent].truncated)]
        return (
            {agent: latest[agent].observation for agent in before},
            rewards,
            {agent: latest[agent].terminated for agent in before},
            {agent: latest[agent].truncated for agent in before},
            {agent: latest[agent].info for agent in before},
        )
