"""`env.*`: the environments of a run, one or several by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from rl_bridge.config.sections import Count, Positive, Sampling, Seconds, Section
from rl_bridge.config.self_play import POLICY, Seating, make_seatings


class EnvConfig(Section):
    """`env.*`: the environment's servers. Set exactly one of `app`, `image` and `url`."""

    app: str | None = None
    """An ASGI application to serve from processes of this machine, as `package.module:name`, or a Python file with an
    environment's class."""
    image: str | None = None
    """A Docker image to serve from containers of this machine."""
    url: str | tuple[str, ...] | None = None
    """The address of a running server, or several."""
    fleet: Literal["ray", "docker", "kubernetes"] | None = None
    """The engine that runs `monarch.roles.environment.replicas` servers of `app` (ray) or `image` (docker, kubernetes),
    and restarts them; by default they run on the controller's host."""
    fleet_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the fleet's class, such as `num_cpus` of `RayFleet`."""
    token_file: str | None = None
    """A file with the token of the servers at `url` or of the fleet; rollout workers read it, on whatever host they
    run."""
    sessions: Count = 128
    """Episodes in flight over all rollout workers, each with a WebSocket session of its own. If generators have GPUs,
    the default is `rollout.max_num_seqs` for each of them, but at most 1 + `rollout.max_staleness` batches, divided
    among the environments if there are several."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Options sent with every reset, apart from the seed."""
    seats: tuple[str, ...] | dict[str, str] = ()
    """Self-play in training: the seats of a game that the policy plays at once and is trained in, each with a baseline
    of its own; or who plays each seat: `policy`, `frozen` (a version of the policy, see `self_play`), the folder of a
    checkpoint of the same model, `package.module:function` (an observation in, an action out), or `server:NAME`, a
    policy of the environment's. Others are played by the server, as `reset` says; so are all but one in held-out
    episodes."""
    trained_seats: tuple[str, ...] = ()
    """Those of the policy's seats that it is trained in; by default all of them."""
    exchange_seats: bool = False
    """Whether the players change seats from table to table of a group, so that the policy is trained in each seat."""
    connect_timeout_s: Seconds = 30.0
    """How long opening a session may take."""
    reset_timeout_s: Seconds = 30.0
    """How long one reset may take."""
    message_timeout_s: Seconds = 30.0
    """How long one step may take."""
    restarts: Annotated[int, Field(ge=0)] = 10
    """How often a server started by the run is restarted before the run ends, or continues without the environment."""
    task: str | None = None
    """This environment's `rollout.task`."""
    tasks: Count | None = None
    """The number of training tasks, each a seed, that groups come back to; None gives every group a seed of its own."""
    sampling: Sampling = "uniform"
    """How groups choose among `tasks`: in passes over all of them, shuffled (uniform) or in order (sequential), or
    preferring tasks whose recent groups had siblings below the best of their group (signal)."""
    weight: Positive = 1.0
    """With several environments: the number of groups in this one for each group in one of weight 1."""

    @property
    def players(self) -> dict[str, str]:
        """Who plays each of `seats`."""
        return self.seats if isinstance(self.seats, dict) else dict.fromkeys(self.seats, POLICY)

    @property
    def seatings(self) -> tuple[Seating, ...]:
        """The seatings of successive tables of a group; none without `seats`."""
        own_seats = [seat for seat, player in self.players.items() if player == POLICY]
        return make_seatings(self.players, self.trained_seats or own_seats, exchange=self.exchange_seats)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses in `url`."""
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "seed" in self.reset:
            raise ValueError("expected env.reset without a seed: every episode has its own; use seed=N")
        if len(self.players) != len(self.seats) or len(self.seats) == 1:
            raise ValueError(
                f"expected the names of two seats or more in env.seats, got {list(self.seats)}; one seat is trained by "
                "env.reset.seat"
            )
        own_seats = [seat for seat, player in self.players.items() if player == POLICY]
        if self.seats and not own_seats:
            raise ValueError(f"expected {POLICY} at one of env.seats or more, got {self.players}")
        if unknown := [seat for seat in self.trained_seats if seat not in own_seats]:
            raise ValueError(
                f"expected env.trained_seats among those of {POLICY}, {own_seats}, got {unknown}"
            )
        if sum(source is not None for source in (self.app, self.image, self.url)) != 1:
            raise ValueError(
                "expected exactly one of env.app (serve it from local processes), env.image (from containers) "
                "and env.url (use running servers)"
            )
        if self.token_file is not None and self.url is None and self.fleet is None:
            raise ValueError(
                "expected env.token_file with env.url or env.fleet; servers on this host ask for no token"
            )
        served = None if self.fleet is None else self.app if self.fleet == "ray" else self.image
        if self.fleet is not None and (served is None or self.token_file is None):
            raise ValueError(
                f"expected env.fleet={self.fleet} with env.{'app' if self.fleet == 'ray' else 'image'} and "
                "env.token_file, the token of its servers"
            )
        if self.sampling != "uniform" and self.tasks is None:
            raise ValueError(
                f"expected env.tasks, a number of tasks to come back to, with env.sampling={self.sampling}, got none: "
                "every group would have a task of its own"
            )
        return self


EnvName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$", max_length=40)]


def env_key(name: str, key: str) -> str:
    """Return the dotted key of an environment, given its name in `Config.environments`."""
    return ".".join(filter(None, ("env", name, key)))


ENV_FORMS: Final = ("<one>", "<several>")
"""Tags of the two forms of `env`, which pydantic puts into the location of an error."""


def _select_env_form(env: Any) -> str:
    by_name = (
        isinstance(env, Mapping)
        and env
        and all(isinstance(value, Mapping | EnvConfig) for value in env.values())
        and not EnvConfig.model_fields.keys() & env.keys()
    )
    return ENV_FORMS[bool(by_name)]


Envs: TypeAlias = Annotated[
    Annotated[EnvConfig, Tag(ENV_FORMS[0])] | Annotated[dict[EnvName, EnvConfig], Tag(ENV_FORMS[1])],
    Discriminator(_select_env_form),
]
