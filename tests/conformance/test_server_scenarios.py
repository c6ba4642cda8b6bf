"""Every server scenario of the official conformance suites, at each protocol version it covers."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conformance_runs import NEXT, RELEASED, SERVER, Outcomes, differences, list_scenarios, run
from serve_process import ServeProcess, serve

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SKILLS = [f"sep-2640-skills-{part}" for part in ("directory", "enumeration", "manifest")]


class Suites:
    """Outcomes of the parts run so far against one server; each part runs once."""

    def __init__(self, server: ServeProcess, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self.outcomes = cache(self._run)

    def _run(self, part: str) -> Outcomes:
        sessions = f"http://127.0.0.1:{self._server.port}/mcp"
        folder = self._folder / part
        match part:
            case "0.1.16":
                return run(RELEASED, folder, "server", "--url", sessions, "--suite", "all")
            case "2025-03-26" | "2025-06-18":
                return run(
                    NEXT, folder, "server", "--url", sessions, "--suite", "all", "--spec-version", part
                )
            case "2025-11-25":
                return run(NEXT, folder, "server", "--url", sessions, "--requirements", part)
            case "2026-07-28":
                return run(NEXT, folder, "server", "--url", self._handle(), "--requirements", part)
        skills = {}
        for scenario in SKILLS:
            skills |= run(NEXT, folder, "server", "--url", self._handle(), "--scenario", scenario)
        return skills

    def _handle(self) -> str:
        """Open a session and return its URL for stateless clients."""
        call = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        status, reply = self._server.request("POST", "/mcp", call, content_type="application/json")
        assert status == 200
        return f"http://127.0.0.1:{self._server.port}/mcp/{reply['result']['session_id']}"


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suites]:
    with serve(app="conformance_app:app", PYTHONPATH=str(HERE)) as server:
        yield Suites(server, tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize("part", SERVER)
def test_server_passes(suites: Suites, part: str) -> None:
    _hold(suites, part)


@pytest.mark.soak
def test_server_of_two_workers_passes(tmp_path: Path) -> None:
    with serve("--workers", "2", app="conformance_app:app", PYTHONPATH=str(HERE)) as server:
        suites = Suites(server, tmp_path)
        for part in ("2025-11-25", "2026-07-28"):
            _hold(suites, part)


def _hold(suites: Suites, part: str) -> None:
    expected = {scenario: verdict for scenario, (verdict, _) in SERVER[part].items()}
    differing = differences(suites.outcomes(part), expected)
    assert not differing, "\n" + "\n".join(differing)


def test_every_scenario_of_the_suites_is_run(suites: Suites) -> None:
    assert set(suites.outcomes("0.1.16")) == list_scenarios(RELEASED, "--server")
    run_of_next = {scenario for part in SERVER if part != "0.1.16" for scenario in suites.outcomes(part)}
    assert run_of_next == list_scenarios(NEXT, "--server")
    for revision in ("2025-11-25", "2026-07-28"):
        required = list_scenarios(NEXT, "--requirements", revision) & list_scenarios(NEXT, "--server")
        assert required <= set(suites.outcomes(revision))
