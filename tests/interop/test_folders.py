"""Folders written for the released package, served by ours and played by everybody's clients."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from released import OVER_SOCKETS, ROOT, drive, environment, our_server


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
    assert "Traceback" not in done.stderr
    assert "got HTTPEnvClient, which it does not: it belongs to release 0.1" in done.stderr
