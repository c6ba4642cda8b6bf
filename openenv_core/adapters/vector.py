"""Adapter for Gymnasium: many sessions of a served environment as one `gymnasium.vector.VectorEnv`.

    envs = ServedVectorEnv("http://localhost:8000", 64)
    observations, infos = envs.reset(seed=1)
    observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

All sessions share one connection, and a step of all is one frame each way. The server must speak `ropewalk.v1`
(docs/protocol.md), as ours do.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from openenv_core.adapters.episode import dict_client
from openenv_core.adapters.gymnasium import make_info
from openenv_core.adapters.spaces import Fields
from openenv_core.client.conversation import BatchReply
from openenv_core.client.vector import VectorClient
from openenv_core.errors import (
    ClientError,
    EnvironmentFailureError,
    OpenEnvError,
    ProtocolError,
)
from openenv_core.loop_thread import shared_loop
from openenv_core.outcomes import TERMINATED, TRUNCATED, infrastructure_failure, unscored_reason
from openenv_core.protocol.batch import Array, columns_of
from openenv_core.protocol.frames import server_error

_MODES: Final = {
    AutoresetMode.NEXT_STEP: "next_step",
    AutoresetMode.SAME_STEP: "same_step",
    AutoresetMode.DISABLED: None,
}


class VectorSteps(NamedTuple):
    """Steps of k of the environments, as `recv` returns them.

    Attributes:
        members: Numbers of the environments, int64 [k].
        observations: A batch of k.
        rewards: float64 [k].
        terminations: bool [k].
        truncations: bool [k].
        infos: As in Gymnasium's vectors: arrays over all environments, with masks.
    """

    members: NDArray[np.int64]
    observations: Any
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    infos: dict[str, Any]


class MembersFailedError(ClientError):
    """Some environments of a vector failed; the steps of the others are valid.

    Attributes:
        errors: The error of each failed environment, by its number.
        steps: The steps of all; zeros for environments that returned none.
    """

    def __init__(self, errors: Mapping[int, OpenEnvError], steps: VectorSteps) -> None:
        number, first = next(iter(errors.items()))
        others = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        super().__init__(
            f"environment {number} of the vector failed: {first}{others}; see `errors` and `steps`"
        )
        self.errors = dict(errors)
        self.steps = steps


class ServedVectorEnv(VectorEnv[Any, Any, Any]):
    """Sessions of a served environment as a Gymnasium vector.

    `send` and `recv` split `step` in two, for some of the environments, so that a slow one does not delay the others.

    Args:
        target: Target of `openenv_core.make`: a name, a folder, `module:attribute`, a URL or an image.
        num_envs: Number of sessions; without room for all of them the server opens none.
        autoreset_mode: When an episode that is over is reset, as in Gymnasium's vectors.
        options: Further arguments of the client, such as `token`.

    Raises:
        ConfigurationError: The target is not found, or its models cannot be expressed as spaces.
        CapacityError: The server has no room for all sessions.
        ClientError: The server does not answer.
    """

    def __init__(
        self,
        target: str,
        num_envs: int,
        *,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        mode = AutoresetMode(autoreset_mode)
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": mode}
        self._autoreset = _MODES[mode]
        with dict_client(target, options) as (self._server, schema):
            self._actions = Fields(schema["action"])
            self._fields = Fields(schema["observation"])
            self.single_action_space = self._actions.space
            self.single_observation_space = self._fields.space
            self.action_space = batch_space(self.single_action_space, num_envs)
            self.observation_space = batch_space(self.single_observation_space, num_envs)
            # Last, so that a failure above takes no slots of the server.
            self._client: VectorClient = self._server.vector(num_envs)
            # A vector may be dropped without a close, as Gymnasium's may.
            weakref.finalize(self, shared_loop().call_detached, self._client.close).atexit = False
        self._all_members = list(range(num_envs))
        self._last: VectorSteps | None = None  # of all, for resets of some

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start episodes; see `gymnasium.vector.VectorEnv.reset`.

        Args:
            seed: Seed of the first environment, each further one getting one more; or a seed for each. None leaves
                seeds to the server.
            options: Further options of the server's resets. `reset_mask`, bool [num_envs], selects environments.

        Raises:
            ClientError: The server is lost, or refuses the options.
            MembersFailedError: Some environments could not be reset.
        """
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        if mask is not None and (
            not isinstance(mask, np.ndarray)
            or mask.shape != (self.num_envs,)
            or mask.dtype != np.bool_
            or not mask.any()
        ):
            raise ValueError(f"reset_mask is to be bool [{self.num_envs}] with a True in it, not {mask!r}")
        members = self._all_members if mask is None else np.flatnonzero(mask).tolist()
        seeds = [seed + member for member in self._all_members] if isinstance(seed, int) else seed
        if seeds is not None and len(seeds) != self.num_envs:
            raise ValueError(f"expected a seed for each of {self.num_envs} environments, got {len(seeds)}")
        fields: dict[str, Any] = {"members": members, "options": options}
        if seeds is not None:
            fields["seeds"] = [seeds[member] for member in members]
        steps = self._read(self._request("reset", fields), members)
        if mask is not None and self._last is not None:
            steps = self._last = self._merge([self._last, steps], self._all_members, steps.infos)
        return steps.observations, steps.infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take an action in each environment; see `gymnasium.vector.VectorEnv.step`.

        Raises:
            ClientError: The server is lost, or refuses the whole request.
            MembersFailedError: Some environments failed.
        """
        arrays: list[Array] = []
        request_fields = self._write(actions, self._all_members, arrays)
        steps = self._read(self._request("step", request_fields, arrays), self._all_members)
        return steps.observations, steps.rewards, steps.terminations, steps.truncations, steps.infos

    def send(self, actions: Any, members: Sequence[int] | None = None, *, at_least: int = 1) -> None:
        """Begin to step some of the environments; `recv` returns the steps.

        Args:
            actions: A batch with an action for each.
            members: Numbers of the environments; None: all. None of them may be in a step already.
            at_least: Number of these steps that `recv` waits for each time.

        Raises:
            ClientError: The server is lost.
        """
        targets = self._all_members if members is None else [int(member) for member in members]
        arrays: list[Array] = []
        request_fields = self._write(actions, targets, arrays)
        shared_loop().run(self._client.send, "step", arrays, **request_fields, at_least=at_least)

    def recv(self) -> VectorSteps:
        """Return completed steps of a `send`, at least its `at_least` unless fewer are left.

        Raises:
            ConfigurationError: No step is in progress.
            ClientError: The server is lost, or refused the whole request.
            MembersFailedError: Some environments failed.
        """
        reply = shared_loop().run(self._client.recv)
        failed = [int(member) for member in reply.fields.get("errors", {})]
        return self._read(reply, [*reply.fields["members"], *failed])

    def close_extras(self, **_: Any) -> None:
        """End the sessions, and the server if this object started it."""
        try:
            shared_loop().run(self._client.close)
        finally:
            self._server.close()

    def _request(self, operation: str, fields: Mapping[str, Any], arrays: Sequence[Array] = ()) -> BatchReply:
        return shared_loop().run(self._client.ask, operation, arrays, **fields)[-1]

    def _write(self, actions: Any, members: list[int], arrays: list[Array]) -> dict[str, Any]:
        """Return the header fields of a step: actions as columns if all their fields are arrays, else as rows."""
        fields, layouts = self._actions, self._actions.layouts
        options: dict[str, Any] = {"autoreset": self._autoreset}
        if members is not self._all_members:  # whom a server asks by default
            options["members"] = members
        if layouts.keys() == fields.parts.keys():
            batches = {fields.single: actions} if fields.single else actions
            columns = {name: columns_of(layout, batches[name], arrays) for name, layout in layouts.items()}
            return {"actions": columns, **options}
        actions_iter = iterate(batch_space(fields.space, len(members)), actions)
        return {"actions": [fields.write(action) for action in actions_iter], **options}

    def _read(self, reply: BatchReply, members: list[int]) -> VectorSteps:
        """Return a reply's steps of these members; MembersFailedError if some failed."""
        errors: dict[int, OpenEnvError] = {}
        infos: dict[str, Any] = {}
        try:
            for member, info in self._iterate_infos(reply):
                infos = self._add_info(infos, info, member)
            steps = self._to_steps(reply, errors)._replace(infos=infos)
            if reply.fields["members"] != members:
                steps = self._merge([steps], members, infos)
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"expected steps of {len(members)} environments: {error!r}") from error
        if members is self._all_members:
            self._last = steps
        if errors:
            raise MembersFailedError(errors, steps)
        return steps

    def _to_steps(self, reply: BatchReply, errors: dict[int, OpenEnvError]) -> VectorSteps:
        """Return the steps of one reply, without infos; add failed members to `errors`."""
        fields = reply.fields
        members, rows = fields["members"], fields.get("rows")
        for member, data in fields.get("errors", {}).items():
            errors[int(member)] = server_error(data)
        member_rows = [*zip(members, rows or (), strict=False)]
        if (final := fields.get("final")) is not None:  # with same_step the other observations are of resets
            member_rows += zip(final["members"], _rows_of(final), strict=True)
        if not members:
            no_flags = np.zeros(0, np.bool_)
            return VectorSteps(np.zeros(0, np.int64), None, np.zeros(0), no_flags, no_flags, {})
        rewards, terminations, truncations = (
            _to_numpy(reply.arrays[fields[name]]) for name in ("reward", "terminated", "truncated")
        )
        for member, row in member_rows:
            if (failure := infrastructure_failure(row)) is not None:
                errors[member] = EnvironmentFailureError(f"the episode does not count: {failure}")
        # NaN stands for no reward, which is 0 unless the episode cannot be scored.
        last_rows = dict(member_rows)
        for index in np.flatnonzero(np.isnan(rewards)).tolist():
            row, done = last_rows.get(members[index]), bool(terminations[index] | truncations[index])
            if row is None or unscored_reason({"done": done, "observation": row}) is None:
                rewards[index] = 0.0
        observations = self._observations(fields, reply.arrays)
        return VectorSteps(np.array(members), observations, rewards, terminations, truncations, {})

    def _iterate_infos(self, reply: BatchReply) -> Iterator[tuple[int, dict[str, Any]]]:
        fields = reply.fields
        if (final := fields.get("final")) is not None:
            observations = self._iterate(self._observations(final, reply.arrays), len(final["members"]))
            for member, observation, row in zip(final["members"], observations, _rows_of(final), strict=True):
                yield member, {"final_obs": observation, "final_info": _make_info(row)}
        for member, row in zip(fields["members"], fields.get("rows", ()), strict="rows" in fields):
            yield member, _make_info(row)

    def _observations(self, fields: Mapping[str, Any], arrays: Sequence[Array]) -> Any:
        """Return the observations of a reply as a batch."""
        columns = fields.get("columns", {})
        batches = {}
        for name, field in self._fields.parts.items():
            if name in columns:
                batches[name] = _fill_arrays(columns[name], arrays)
            else:
                values = [field.read(row.get(name)) for row in fields["rows"]]
                batches[name] = _make_batch(field.space, values)
        return batches[self._fields.single] if self._fields.single else batches

    def _merge(self, parts: Sequence[VectorSteps], members: list[int], infos: dict[str, Any]) -> VectorSteps:
        """Merge steps in the order of `members`, later ones over earlier; zeros for members without a step."""
        space, count = self.single_observation_space, len(members)
        observations = self._iterate(create_empty_array(space, count, fn=np.zeros), count)
        rewards, (terminations, truncations) = np.zeros(count), np.zeros((2, count), np.bool_)
        positions = {member: position for position, member in enumerate(members)}
        for steps in parts:
            rows = [positions[member] for member in steps.members.tolist()]
            rewards[rows] = steps.rewards
            terminations[rows], truncations[rows] = steps.terminations, steps.truncations
            for position, observation in zip(rows, self._iterate(steps.observations, len(rows)), strict=True):
                observations[position] = observation
        return VectorSteps(
            np.array(members), _make_batch(space, observations), rewards, terminations, truncations, infos
        )

    def _iterate(self, batch: Any, count: int) -> list[Any]:
        return list(iterate(batch_space(self.single_observation_space, count), batch)) if count else []


def _make_batch(space: Space[Any], values: Sequence[Any]) -> Any:
    empty: Any = create_empty_array(space, len(values))
    return concatenate(space, values, empty)


def _fill_arrays(tree: Any, arrays: Sequence[Array]) -> Any:
    """Return columns with their array indices replaced by the arrays."""
    if isinstance(tree, dict):
        return {name: _fill_arrays(subtree, arrays) for name, subtree in tree.items()}
    if isinstance(tree, list):
        return tuple(_fill_arrays(subtree, arrays) for subtree in tree)
    return _to_numpy(arrays[tree])


def _to_numpy(array: Array) -> "NDArray[Any]":
    return np.ndarray(array.shape, array.dtype, array.data)


def _rows_of(final: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return final.get("rows") or [{}] * len(final["members"])


def _make_info(row: Mapping[str, Any]) -> dict[str, Any]:
    info = make_info(row.get("metadata"), row.get("info"))
    return {name: value for name, value in info.items() if name not in (TERMINATED, TRUNCATED)}
