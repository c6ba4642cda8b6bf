"""An environment that says of itself what is wrong with it, in every way in which that can be said.

Imported by the tests, and by the server that serves its app.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from rollout_fixtures import Note, with_session_count

from openenv_core import EnvClient, Environment, Observation, State
from rl_bridge.rollout import Task
from rl_bridge.tokens.chat import Message
from servers import create_app

EARNED = 0.25
LENGTH = 3

SAYINGS: dict[str, dict[str, Any]] = {
    "status": {"status": "sandbox_error", "reason": "the zygote is gone"},
    "metadata": {"metadata": {"infrastructure_error": "the zygote is gone"}},
    "released": {"metadata": {"execution": {"status": "sandbox_error", "reason": "the zygote is gone"}}},
}
"""How an observation says that the infrastructure failed."""


class Report(Observation):
    status: str = "ok"
    reason: str | None = None


class Troubled(Environment[Note, Report, State]):
    """Three steps, each worth 0.25. What goes wrong is asked for with the reset."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    BLOCKING = False
    failed: ClassVar[Counter[tuple[str, int | None]]] = Counter()
    """Of the whole server: how often a test's seed has failed already."""

    def __init__(self) -> None:
        self._steps = 0

    def reset(
        self,
        *,
        seed: int | None = None,
        episode_id: str | None = None,
        test: str = "",
        saying: str = "status",
        at: int = 2,
        failing: Sequence[int] = (),
        times: int = 1,
        unjudged: Sequence[int] = (),
        because: str | bool | None = "the judge took too long",
    ) -> Report:
        self._steps = 0
        self._key = (test, seed)
        self._saying, self._at = saying, at
        self._fails = seed in failing and Troubled.failed[self._key] < times
        self._unjudged, self._because = seed in unjudged, because
        return self._report()

    def step(self, action: Note) -> Report:
        self._steps += 1
        return self._report()

    @property
    def state(self) -> State:
        return State(step_count=self._steps)

    def _report(self) -> Report:
        over = self._steps == LENGTH
        if self._fails and self._steps == self._at:
            Troubled.failed[self._key] += 1
            # The worst that it could say: a reward that would be learnt from, and an end that would be believed.
            return Report(reward=-100.0, done=self._at == LENGTH, **SAYINGS[self._saying])
        if over and self._unjudged:
            return Report(done=True, metadata={} if self._because is None else {"unscored": self._because})
        return Report(reward=EARNED if self._steps else None, done=over)


class TroubledClient(EnvClient[Note, Report, State]):
    action_type = Note
    observation_type = Report
    state_type = State


troubled_app = with_session_count(
    create_app(Troubled, Note, Report, env_name="troubled", max_concurrent_envs=64)
)


class TroubledTask(Task):
    client_type = TroubledClient

    def messages(self, observation: Report) -> list[Message]:
        return [{"role": "user", "content": "go on"}]

    def parse(self, text: str) -> Note | None:
        return Note(text=text)
