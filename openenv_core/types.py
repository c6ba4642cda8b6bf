"""The values that cross the wire: actions, observations, states and what a caller gets back.

Authors subclass `Action`, `Observation` and `State`; everything else here is used as it is.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Self

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
    infrastructure_failure,
    unscored_reason,
    was_terminated,
    was_truncated,
)

ActT = TypeVar("ActT", default=Any)
ObsT = TypeVar("ObsT", default=Any)
StateT = TypeVar("StateT", default=Any)
ObsT_co = TypeVar("ObsT_co", covariant=True, default=Any)

# Bytes travel as base64, so that any bytes travel; the same setting reads them back.
_WIRE = ConfigDict(arbitrary_types_allowed=True, ser_json_bytes="base64", val_json_bytes="base64")

Reward = bool | int | float | None
"""What an observation may carry as its reward. The JSON type is kept on the WebSocket."""


class _FloatFirst:
    """Takes a float as it is: the union below would try a bool and an integer first, for a third of a model's cost."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        union = handler(source)
        a_float = core_schema.chain_schema(
            [core_schema.is_instance_schema(float), core_schema.float_schema()]
        )
        either = core_schema.union_schema([a_float, union], mode="left_to_right")
        return core_schema.json_or_python_schema(json_schema=union, python_schema=either)


class Action(BaseModel):
    """What an agent asks of an environment. Subclass it and add fields; unknown keys are refused."""

    model_config = ConfigDict(**_WIRE, extra="forbid")

    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    """What an environment answers. Subclass it and add fields; unknown keys are refused.

    Released clients refuse fields that they do not know, so the last four travel as keys of the metadata, where they
    say something: an observation that leaves them alone is sent as a released server sends it.

    Attributes:
        done: True when the episode is over. A further step needs a reset first.
        reward: The reward of this step alone (a delta, never a running sum); None where there is none.
        metadata: Anything beside the observation proper, for logs and tools.
        terminated: The episode has come to an end of its own. Unless it is given: `done and not truncated`.
        truncated: It was cut off, by a limit of turns or of time for one: what would have come next has a worth. Needs
            `done`.
        infrastructure_error: What failed beside the policy, in words; see `openenv_core.outcomes`.
        unscored: Why a last observation has no reward, in words; likewise.
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
        """Fill in the marks that the metadata has, as they come over the wire."""
        if not (self.metadata or self.done or self.truncated):
            return self
        given, fields = self.__pydantic_fields_set__, self.__dict__
        if self.metadata:
            for name, kind in _MARKS.items():
                mark = self.metadata.get(name)
                # What is cut off in an episode that goes on is something else.
                if (
                    isinstance(mark, kind)
                    and (self.done or kind is str)
                    and name not in given
                    and self._is_mark(name)
                ):
                    fields[name] = mark
        self._check_ends()
        if self.done and not self.truncated and TERMINATED not in given and self._is_mark(TERMINATED):
            fields[TERMINATED] = True
        return self

    def _check_ends(self) -> None:
        if self.done is False and (self.truncated is True and self._is_mark(TRUNCATED)):
            raise ValueError("an episode that is truncated is over; say done=True too")

    @classmethod
    def _is_mark(cls, name: str) -> bool:
        """Whether a field is the one above: environments may have fields of these names, which mean what they mean."""
        return cls.model_fields[name].exclude is True

    def wire_metadata(self) -> dict[str, Any]:
        """Return the metadata as they are sent: with the marks that say something.

        Raises:
            ValueError: The episode is truncated, and not done.
        """
        if not (self.truncated or self.infrastructure_error or self.unscored):
            return self.metadata
        self._check_ends()
        marks = {name: mark for name in _MARKS if (mark := getattr(self, name)) and self._is_mark(name)}
        if TRUNCATED not in marks or TERMINATED not in self.__pydantic_fields_set__:
            marks.pop(TERMINATED, None)  # it follows from the rest
        return {**self.metadata, **marks}


_MARKS: Final = {TERMINATED: bool, TRUNCATED: bool, INFRASTRUCTURE_ERROR: str, UNSCORED: str}


class State(BaseModel):
    """Where an episode stands. Environments may add keys, declared or not."""

    model_config = ConfigDict(**_WIRE, extra="allow")

    episode_id: str | None = None
    step_count: NonNegativeInt = 0


class EnvironmentMetadata(BaseModel):
    """What an environment says of itself on `GET /metadata`."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    name: str
    description: str
    readme_content: str | None = None
    version: str | None = None
    author: str | None = None
    documentation_url: str | None = None


class ConcurrencyConfig(BaseModel):
    """How many sessions a server holds, and how long it keeps one that nobody uses.

    Attributes:
        max_concurrent_envs: The greatest number of sessions at once.
        session_timeout: Seconds that a session may go unused; None leaves it to the server's settings.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    max_concurrent_envs: PositiveInt = 1
    session_timeout: PositiveFloat | None = None


@dataclass
class StepResult(Generic[ObsT_co]):
    """What `reset` and `step` of a client return.

    Attributes:
        observation: The environment's observation.
        reward: The reward of this step; None where there is none (after a reset, for one).
        done: True when the episode is over.
        metadata: The observation's metadata; None when it is empty.
    """

    observation: ObsT_co
    reward: Reward = None
    done: bool = False
    metadata: dict[str, Any] | None = None

    # What follows is said in the metadata or the observation: released servers and clients know the fields above alone.

    @property
    def terminated(self) -> bool:
        """Whether the episode has come to an end of its own."""
        return was_terminated(vars(self))

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut off, by a limit of turns or of time for one."""
        return was_truncated(vars(self))

    @property
    def infrastructure_error(self) -> str | None:
        """What failed beside the policy, in words: the episode is worth nothing. None where nothing did."""
        return infrastructure_failure(vars(self))

    @property
    def unscored(self) -> str | None:
        """Why an episode that is over has no reward, in words. None where it has one, or is not over."""
        return unscored_reason(vars(self))
