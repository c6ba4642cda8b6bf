"""What lives as long as an app: begun before the first connection, ended after the last session."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from free_ports import free_port
from serve_process import PATIENCE_S, SUPPORT, eventually, refusal, serve
from serving import serving

from openenv_core.errors import ConfigurationError
from servers.app import EnvironmentApp

REFUSAL = "expected a better place, got this one; go elsewhere"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def lines(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


@pytest.fixture
def app(notes: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentApp:
    monkeypatch.setenv("NOTES", str(notes))
    import lifelong

    return lifelong.app


async def test_it_lives_from_before_the_first_connection_to_after_the_last_session(
    app: EnvironmentApp, notes: Path
) -> None:
    for turn in (1, 2):  # an app may be served again
        async with serving(app) as address, httpx.AsyncClient() as client:
            assert lines(notes)[-1] == "start exposed=None"
            opened = await client.post(
                f"http://{address}/reset", json={}, headers={"X-OpenEnv-Session": "new"}
            )
            assert opened.status_code == 200
        assert lines(notes)[-2:] == ["session closed", "end"]
        assert lines(notes).count("end") == turn


async def test_a_refusal_leaves_the_app_as_it_was(
    app: EnvironmentApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(ConfigurationError, match="a better place"):
        async with app.running():
            raise AssertionError("expected no start")
    monkeypatch.delenv("REFUSE")
    async with serving(app) as address, httpx.AsyncClient() as client:
        assert (await client.get(f"http://{address}/health")).status_code == 200


@pytest.mark.parametrize(
    ("words", "exposed"), [((), False), (("--host", "0.0.0.0", "--insecure"), True), (("--reload",), False)]
)
def test_it_knows_who_can_reach_the_server(words: tuple[str, ...], exposed: bool, notes: Path) -> None:
    with serve(*words, app="lifelong:app", NOTES=str(notes)):
        eventually(lambda: lines(notes))
    assert lines(notes) == [f"start exposed={exposed}", "end"]


def test_every_worker_has_its_own(notes: Path) -> None:
    with serve("--workers", "2", "--host", "0.0.0.0", "--insecure", app="lifelong:app", NOTES=str(notes)):
        eventually(lambda: len(lines(notes)) == 2)
    assert lines(notes) == ["start exposed=True"] * 2 + ["end"] * 2


@pytest.mark.parametrize("words", [(), ("--workers", "2")])
def test_a_refusal_is_a_message_and_a_status(words: tuple[str, ...], notes: Path) -> None:
    status, said = refusal(*words, app="lifelong:app", NOTES=str(notes), REFUSE="1")
    assert status == 2
    assert said.count(REFUSAL) == 1
    assert "Traceback" not in said
    assert "end" not in lines(notes)


def test_a_mistake_shows_its_traceback(notes: Path) -> None:
    status, said = refusal(app="lifelong:app", NOTES=str(notes), BREAK="1")
    assert status not in (0, None)
    assert "Traceback" in said
    assert "RuntimeError: nobody meant this" in said


def test_under_plain_uvicorn_a_refusal_is_a_message_too(notes: Path) -> None:
    port = free_port()
    done = subprocess.run(
        [sys.executable, "-m", "uvicorn", "lifelong:app", "--port", str(port)],
        cwd=SUPPORT,
        env={
            "NOTES": str(notes),
            "REFUSE": "1",
            "PATH": "",
            "PYTHONPATH": str(Path(SUPPORT).parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode != 0
    assert done.stderr.count(REFUSAL) == 1
    assert "Traceback" not in done.stderr
    assert lines(notes) == ["start exposed=None"]
