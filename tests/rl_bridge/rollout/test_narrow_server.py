"""A server with fewer slots than the run has sessions: the admitted ones play everything."""

import asyncio
from pathlib import Path

import pytest
from rollout_fixtures import NotebookTask
from test_rollout_workers import playing, until_no_session_is_left

from openenv_core import LocalProcessProvider
from rl_bridge.errors import RolloutError
from rl_bridge.rollout import workers

HERE = str(Path(__file__).parent)
SLOTS = 2


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BACKOFF_S", 0.001)


async def test_sessions_that_are_admitted_play_what_the_others_cannot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalProcessProvider("rollout_fixtures:narrow_app", cwd=HERE) as provider:
        async with playing(str(provider.url), NotebookTask, lambda prompt: "word", sessions=8) as play:
            for seeds in (list(range(200)), list(range(200, 400))):
                episodes = await play(seeds)
                assert [episode and episode.seed for episode in episodes] == seeds
            assert play.workers.dropped == 0
        await until_no_session_is_left(str(provider.url))
    told = [record.getMessage() for record in caplog.records if record.name == workers.__name__]
    assert len(told) == 1  # not one a session, nor one a batch
    assert "fewer than the 8 sessions of env.sessions" in told[0]


async def test_nobody_admitted_is_an_error_that_counts_every_episode() -> None:
    with LocalProcessProvider("rollout_fixtures:narrow_app", cwd=HERE) as provider:
        url = str(provider.url)
        async with playing(url, NotebookTask, lambda prompt: "word", sessions=SLOTS) as holder:
            await holder(list(range(8)))
            async with playing(url, NotebookTask, lambda prompt: "word", sessions=4) as play:
                with pytest.raises(RolloutError, match=r"none of 50 .*expected a free session"):
                    await asyncio.wait_for(play(list(range(50))), 30)
                assert play.workers.dropped == 50
