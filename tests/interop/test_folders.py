"""Folders written for the released package, served by our server and played by everybody's clients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat_server
from released import OVER_SOCKETS, drive, our_server, released_server
from serve_process import run_refused_server

from openenv_core import GenericEnvClient
from openenv_core.outcomes import SCORES

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


@pytest.mark.soak
@pytest.mark.parametrize("whose", ["released", "ours"])
@pytest.mark.parametrize("version", OVER_SOCKETS)
def test_scaffold_clients_see_no_difference(
    version: str, whose: str, scaffolds: Callable[[str], Path], released_url: Callable[[str], str]
) -> None:
    """The scaffold's own client class, under its release and under ours, against its release's server and ours."""
    folder = str(scaffolds(version))
    plan = [{"reset": {}}, {"step": {"message": "hello"}}, {"step": {"message": ""}}, {"state": {}}]

    def play(url: str) -> list[Any]:
        client = version if whose == "released" else None
        return drive(client, "folder_client", url, folder, whose, "sync", plan=plan)["sync"]

    theirs = play(released_url(version))
    with our_server(folder) as url:
        ours = play(url)
    for outcome in (*theirs, *ours):
        outcome.get("observation", {}).pop("metadata", None)  # before 0.4 it was dropped on the way
    assert ours == theirs
    assert ours[1]["observation"]["echoed_message"] == "hello"


def test_released_rubrics_give_the_same_rewards_and_scores() -> None:
    """A gate, a trajectory rubric and a judge, played by a released client on a released server and on ours."""
    folders = Path(__file__).parent / "folders"
    plan = [[{"reset": {}}, *({"step": {"word": word}} for word in ("one", "Two", "one"))]]
    with chat_server("I say 0.5.") as judge:
        told = {"JUDGE_PORT": str(judge.port)}
        with released_server("0.10.0", "judged_env.server.app:app", folders, **told) as url:
            (theirs,) = drive("0.10.0", "episodes", url, "async", plan=plan)
        with our_server(str(folders / "judged_env"), **told) as url:
            (ours,) = drive("0.10.0", "episodes", url, "async", plan=plan)
            with GenericEnvClient(url).sync() as client:
                client.reset()
                judge.answers = [401]
                failed = client.step({"word": "two"})
    said, shut, _ = (one["observation"]["metadata"][SCORES] for one in ours[1:])
    for one in (*ours, *theirs):
        del one["observation"]["metadata"]
    assert ours == theirs
    # Of the judge and the trajectory in halves; the gate is shut; the trajectory has not heard what was not let by.
    assert [one["reward"] for one in ours[1:]] == [0.375, 0.0, pytest.approx(7 / 12)]
    assert shut == {"rubric_0": 0.0, "rubric_0.rubric": 0.0}
    assert said == {
        "rubric_0": 1.0,
        "rubric_0.rubric": 1.0,
        "rubric_1": 0.375,
        "rubric_1.rubric_0": 0.5,
        "rubric_1.rubric_1": 0.25,
    }
    assert failed.reward is None
    assert "got status 401" in str(failed.infrastructure_error)


@pytest.mark.soak
def test_folder_of_the_first_release_is_refused(scaffolds: Callable[[str], Path]) -> None:
    status, output = run_refused_server(app=str(scaffolds("0.1.1")))
    assert status == 2
    assert "Traceback" not in output
    assert "got HTTPEnvClient, which it does not: it belongs to release 0.1" in output
