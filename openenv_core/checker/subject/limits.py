"""How much the checker tries."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much is tried.

    Attributes:
        sessions: Sessions at once under load.
        episodes: Episodes over which leaks are looked for.
        steps: Steps of one episode, where a check does not play to the end.
        fuzz: Fuzzed actions a check.
        seed: What every choice of the checker comes from.
        step_timeout_s: Seconds that a reply may take.
        start_timeout_s: Seconds until a server must be healthy.
    """

    sessions: int = 16
    episodes: int = 1000
    steps: int = 200
    fuzz: int = 100
    seed: int = 0
    step_timeout_s: float = 10.0
    start_timeout_s: float = 60.0
