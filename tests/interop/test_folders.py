"""Folders written for the released package, served by ours and played by everybody's clients."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from released import OVER_SOCKETS, ROOT, drive, environment, our_server, released_server


@pytest.mark.soak
@pytest.mark.parametrize("version", OVER_SOCKETS)
def test_the_scaffold_of_every_release_is_served(version: str, scaffolds: Callable[[str], Path]) -> None:
    with our_server(str(scaffolds(version))) as url:
        for face in ("async", "sync"):
            plan = [{"reset": {}}, {"step": {"message": "hello"}}, {"step": {"wrong": 1}}, {"state": {}}]
            (outcomes,) = drive("0.10.0", "episodes", url, face, plan=[plan])
            begun, step, wrong, state = outcomes
            assert begun["done"] is False
            assert step["observation"]["echoed_message"] == "hello"
            assert step["reward"] == pytest.approx(0.5)
            assert "VALIDATION_ERROR" in wrong["text"]
            assert state["step_count"] == 1


@pytest.mark.soak
@pytest.mark.parametrize("whose", ["released", "ours"])
@pytest.mark.parametrize("version", OVER_SOCKETS)
def test_the_clients_of_the_scaffold_see_no_difference(
    version: str, whose: str, scaffolds: Callable[[str], Path], released_url: Callable[[str], str]
) -> None:
    """The scaffold's own client class, under its release and under ours, against its release's server and ours."""
    folder = str(scaffolds(version))
    client = version if whose == "released" else None
    theirs = drive(client, "scaffold_client", released_url(version), folder, whose)
    with our_server(folder) as url:
        ours = drive(client, "scaffold_client", url, folder, whose)
    for outcome in (*theirs, *ours):
        outcome.get("observation", {}).pop("metadata", None)  # before 0.4 it was dropped on the way
    assert ours == theirs
    assert ours[1]["observation"]["echoed_message"] == "hello"


@pytest.mark.soak
def test_the_folder_that_one_stands_in_is_served(scaffolds: Callable[[str], Path]) -> None:
    with our_server(".", cwd=scaffolds("0.10.0")) as url:
        (outcomes,) = drive("0.10.0", "episodes", url, "sync", plan=[[{"step": {"message": "hi"}}]])
        assert outcomes[0]["observation"]["echoed_message"] == "hi"


def test_a_folder_of_the_first_release_is_refused_by_name(scaffolds: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openenv_core.cli", "serve", str(scaffolds("0.1.1")), "--port", "0"],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "got HTTPEnvClient, which it does not: it belongs to release 0.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_where_both_packages_are_found_serving_stops(
    tmp_path: Path, scaffolds: Callable[[str], Path]
) -> None:
    site = tmp_path / "site"
    (site / "openenv-0.10.0.dist-info").mkdir(parents=True)
    (site / "openenv-0.10.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: openenv\nVersion: 0.10.0\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "openenv_core.cli", "serve", str(scaffolds("0.10.0")), "--port", "0"],
        env=environment(PYTHONPATH=os.pathsep.join((str(ROOT), str(site)))),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "got openenv 0.10.0 in the same environment" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.soak
def test_the_moody_folder_runs_under_the_released_package_and_under_ours() -> None:
    folder = Path(__file__).parent / "folders" / "moody_env"
    plan = [{"reset": {"seed": 1}}, {"step": {"mood": "rubric"}}, {"step": {"mood": "done"}}, {"state": {}}]
    with (
        released_server("0.10.0", "moody_env.server.app:app", folder.parent) as theirs,
        our_server(str(folder)) as ours,
    ):
        answers = [drive("0.10.0", "episodes", url, "async", plan=[plan]) for url in (theirs, ours)]
    assert answers[0] == answers[1]
    assert answers[1][0][1]["reward"] == 0.5
