"""Every server scenario of the official conformance suites, at each protocol version it covers."""

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import pytest
from conformance_runs import NEXT, RELEASED, SERVER, Outcomes, differences, list_scenarios, run
from serve_process import ServeProcess, serve

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SKILLS = [f"sep-2640-skills-{part}" for part in ("directory", "enumeration", "manifest")]


RunPart: TypeAlias = Callable[[str], Outcomes]


def run_part(server: ServeProcess, folder: Path, part: str, *, single_session: bool = False) -> Outcomes:
    address = f"http://127.0.0.1:{server.port}/mcp"

    def stateless_address() -> str:
        if single_session:
            return address
        call = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        status, reply = server.request("POST", "/mcp", call, content_type="application/json")
        assert status == 200
        return f"{address}/{reply['result']['session_id']}"

    def run_suite(package: str, url: str, *arguments: str) -> Outcomes:
        sys.stdout.write(f"{package} {' '.join(arguments)} at {url}\n")
        return run(package, folder / part, "server", "--url", url, *arguments)

    match part:
        case "0.1.16":
            return run_suite(RELEASED, address, "--suite", "all")
        case "2025-03-26" | "2025-06-18":
            return run_suite(NEXT, address, "--suite", "all", "--spec-version", part)
        case "2025-11-25":
            return run_suite(NEXT, address, "--requirements", part)
        case "2026-07-28":
            return run_suite(NEXT, stateless_address(), "--requirements", part)
    skills: Outcomes = {}
    for scenario in SKILLS:
        skills = {**skills, **run_suite(NEXT, stateless_address(), "--scenario", scenario)}
    return skills


@pytest.fixture(scope="module")
def outcomes_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPart]:
    """What came out of a part against one server; each part is run once."""
    with serve(app="conformance_app:app", PYTHONPATH=str(HERE)) as server:
        yield cache(partial(run_part, server, tmp_path_factory.mktemp("conformance")))


def assert_as_expected(part: str, outcomes: Outcomes) -> None:
    differing = differences(outcomes, {scenario: verdict for scenario, (verdict, _) in SERVER[part].items()})
    assert not differing, "\n" + "\n".join(differing)


@pytest.mark.parametrize("part", SERVER)
def test_server_passes(outcomes_of: RunPart, part: str) -> None:
    assert_as_expected(part, outcomes_of(part))


def test_bare_url_of_a_single_session_passes_too(tmp_path: Path) -> None:
    """The URL that a user types, for clients that neither name a session nor begin with initialize."""
    with serve("--mcp-single-session", app="conformance_app:app", PYTHONPATH=str(HERE)) as server:
        assert_as_expected("2026-07-28", run_part(server, tmp_path, "2026-07-28", single_session=True))


@pytest.mark.soak
def test_server_of_two_workers_passes(tmp_path: Path) -> None:
    with serve("--workers", "2", app="conformance_app:app", PYTHONPATH=str(HERE)) as server:
        for part in ("2025-11-25", "2026-07-28"):
            assert_as_expected(part, run_part(server, tmp_path, part))


def test_every_scenario_of_the_suites_is_run(outcomes_of: RunPart) -> None:
    assert set(outcomes_of("0.1.16")) == list_scenarios(RELEASED, "--server")
    run_of_next = {scenario for part in SERVER if part != "0.1.16" for scenario in outcomes_of(part)}
    assert run_of_next == list_scenarios(NEXT, "--server")
    for revision in ("2025-11-25", "2026-07-28"):
        required = list_scenarios(NEXT, "--requirements", revision) & list_scenarios(NEXT, "--server")
        assert required <= set(outcomes_of(revision))
