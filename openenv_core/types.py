"""The models on the wire: actions, observations, states and step results.

Authors subclass `Action`, `Observation` and `State`; the other classes are used as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypeVar

from openenv_core.outcomes import (
    INFRASTRUCTURE_ERROR,
    TERMINATED,
    TRUNCATED,
    UNSCORED,
    Outcome,
    outcome_of,
)

ActT = TypeVar("ActT", default=Any)
ObsT = TypeVar("ObsT", default=Any)
StateT = TypeVar("StateT", default=Any)
ObsT_co = TypeVar("ObsT_co", covariant=True, default=Any)

# Bytes are base64 in JSON, in both directions, because JSON text cannot hold arbitrary bytes.
_WIRE = ConfigDict(
    arbitrary_types_allowed=True, ser_json_bytes="base64", val_json_bytes="base64", defer_build=True
)

Reward = bool | int | float | None
"""The type of an observation's reward. The WebSocket keeps its JSON type."""


class _FloatFirst:
    """Validates floats first: the union would try bool and int before, at a third of a model's validation cost."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        union = handler(source)
        a_float = core_schema.chain_schema(
            [core_schema.is_instance_schema(float), core_schema.float_schema()]
        )
        either = core_schema.union_schema([a_float, union], mode="left_to_right")
        return core_schema.json_or_python_schema(json_schema=union, python_schema=either)


class Action(BaseModel):
    """An agent's action. Subclass it and add fields; unknown keys are rejected."""

    model_config = ConfigDict(**_WIRE, extra="forbid")

    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    """An environment's observation. Subclass it and add fields; unknown keys are rejected.

    Released clients reject unknown fields, so the last four are sent as keys of the metadata, and only if they add
    information (`terminated` only if given beside `truncated`). An observation that does not use them looks on the wire
    as a released server's does.

    Attributes:
        done: True when the episode is over; call `reset` before the next step.
        reward: The reward of this step, not cumulative; None if there is none.
        metadata: Additional data for logs and tools.
        terminated: The episode reached an end of its own. Default: `done and not truncated`.
        truncated: The episode was cut off, for example by a step or time limit, so that a value function should
            bootstrap. Either of the two implies `done`.
        infrastructure_error: What failed other than the policy; see `openenv_core.outcomes`.
        unscored: Why the episode cannot be scored, on an observation without a reward; see `openenv_core.outcomes`.
    """

    model_config = ConfigDict(**_WIRE, extra="forbid")

    done: bool = False
    reward: Annotated[Reward, _FloatFirst] = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    terminated: SkipJsonSchema[bool] = Field(default=False, exclude=True, repr=False)
    truncated: SkipJsonSchema[bool] = Field(default=False, exclude=True, repr=False)
    infrastructure_error: SkipJsonSchema[str | None] = Field(default=None, exclude=True, repr=False)
    unscored: SkipJsonSchema[str | None] = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="after")
    def _read_marks(self) -> Self:
        """Set the mark fields from the metadata, which carries them on the wire."""
        if not (self.metadata or self.done or self.truncated or self.terminated):
            return self
        given, fields = self.__pydantic_fields_set__, self.__dict__
        if self.metadata:
            for name, kind in _MARKS.items():
                mark = self.metadata.get(name)
                # In an episode that is not over, "truncated" means something else.
                if (
                    isinstance(mark, kind)
                    and (self.done or kind is str)
                    and name not in given
                    and self._is_mark(name)
                ):
                    fields[name] = mark
        self._end()
        if self.done and not self.truncated and TERMINATED not in given and self._is_mark(TERMINATED):
            fields[TERMINATED] = True
        return self

    def _end(self) -> None:
        """Set `done` where the episode has terminated or was truncated."""
        for name in (TERMINATED, TRUNCATED):
            if self.__dict__[name] is True and self._is_mark(name):
                self.__dict__["done"] = True

    @classmethod
    def _is_mark(cls, name: str) -> bool:
        """Whether a field is the one above, not one that the environment declares with the same name."""
        return cls.model_fields[name].exclude is True


_MARKS: Final = {TERMINATED: bool, TRUNCATED: bool, INFRASTRUCTURE_ERROR: str, UNSCORED: str}
"""The fields of an outcome, which the metadata carries on the wire."""


class State(BaseModel):
    """The state of an episode. Environments may add fields, declared or not.

    Attributes:
        episode_id: The caller's name of the episode, or a drawn one.
        step_count: Number of steps taken.
        seed: The seed of the episode, given or drawn; None if the environment does not say.
    """

    model_config = ConfigDict(**_WIRE, extra="allow")

    episode_id: str | None = None
    step_count: NonNegativeInt = 0

    # Sent only where it is set: the states of released environments have no such key.
    if TYPE_CHECKING:
        seed: int | None = None
    else:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "seed":
                    return None
                raise


for _base in (Action, Observation, State):
    # The base itself is built on first use, to be imported fast. An author's subclass is built where it is defined, so
    # that a mistake in it shows there.
    del _base.model_config["defer_build"]


class EnvironmentMetadata(BaseModel):
    """An environment's description of itself, as `GET /metadata` returns it."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    name: str
    description: str
    readme_content: str | None = None
    version: str | None = None
    author: str | None = None
    documentation_url: str | None = None


class ConcurrencyConfig(BaseModel):
    """How many sessions a server may hold, and when it closes an idle one.

    Attributes:
        max_concurrent_envs: Maximum number of concurrent sessions.
        session_timeout: Seconds after which an idle session is closed; None uses the server's settings.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    max_concurrent_envs: PositiveInt = 1
    session_timeout: PositiveFloat | None = None


@dataclass(eq=False)
class StepResult(Generic[ObsT_co]):
    """The result of a client's `step`. It unpacks as Gymnasium's: `observation, reward, terminated, truncated, info`.

    Attributes:
        observation: The environment's observation.
        reward: The reward of this step; None if there is none, as after a reset.
        done: True when the episode is over.
        metadata: The observation's metadata; None when it is empty.
    """

    observation: ObsT_co
    reward: Reward = None
    done: bool = False
    metadata: dict[str, Any] | None = None

    @property
    def outcome(self) -> Outcome:
        """How the step left its episode, read from the metadata and the observation."""
        return outcome_of(vars(self))

    @property
    def terminated(self) -> bool:
        """Whether the episode reached an end of its own."""
        return self.outcome.terminated

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut off, for example by a step or time limit."""
        return self.outcome.truncated

    @property
    def infrastructure_error(self) -> str | None:
        """What failed other than the policy, so that the episode must not be scored; None if nothing failed."""
        return self.outcome.infrastructure_error

    @property
    def unscored(self) -> str | None:
        """Why the episode cannot be scored, so that none of its rewards count; None if this step does not say so."""
        return self.outcome.unscored

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, StepResult) else NotImplemented

    def __iter__(self) -> Iterator[Any]:
        """Yield Gymnasium's five: observation, reward, terminated, truncated, info."""
        outcome = self.outcome
        yield from (self.observation, self.reward, outcome.terminated, outcome.truncated, self.metadata or {})


@dataclass(eq=False)
class ResetResult(StepResult[ObsT_co]):
    """The result of a client's `reset`: a `StepResult` that unpacks as Gymnasium's two."""

    def __iter__(self) -> Iterator[Any]:
        """Yield observation and info."""
        yield from (self.observation, self.metadata or {})
