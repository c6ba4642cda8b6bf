"""`ropewalk top`: its rates are those between two scrapes; it restores the terminal."""

import asyncio
import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from counter import Counter
from serve_process import serve
from server_apps import app_of, step
from serving import ask, serving, socket_to
from terminal_process import in_terminal
from test_metrics import TOKEN

from openenv_core.cli import main
from servers.cli.top import COMMAND, lines_of, quantile, rows_of, scrape
from tests.rl_bridge.metrics.status_fixtures import served, snapshot

RUN = "import sys; from openenv_core.cli import main; from servers.cli.top import COMMAND; "
PROGRAM = ("-c", f"{RUN}sys.exit(main.run(COMMAND, sys.argv[1:]))")


async def test_rates_are_computed_between_two_scrapes() -> None:
    async with serving(app_of(Counter)) as address, socket_to(address) as socket:
        with httpx.Client(trust_env=False) as client:
            await ask(socket, {"type": "reset"})
            before = await asyncio.to_thread(scrape, client, f"http://{address}")
            for _ in range(6):  # the last of them fails
                await ask(socket, step())
            now = await asyncio.to_thread(scrape, client, f"http://{address}")
    now = replace(now, at=before.at + 2.0)
    (row,) = rows_of(before, now)
    for name in ("p50", "p99", "in environment", "out/s"):
        assert float(re.match(r"[\d.]+", row.pop(name)).group()) > 0, name  # type: ignore[union-attr]  # it has digits
    assert row == {
        "server": f"counter http://{address}",
        "slots": "1/4",
        "waiting": "0",
        "steps/s": "2.5",
        "resets/s": "0.0",
        "in/s": f"{6 * len(json.dumps(step())) // 2} B",
        "errors/s": "EXECUTION_ERROR 0.5",
    }
    # A server that was started again has counted from zero since; of one that did not answer nothing is known.
    fewer = replace(now, samples={**now.samples, ("ropewalk_call_seconds_count", "step"): 2.0}, at=now.at + 1)
    assert rows_of(now, fewer)[0]["steps/s"] == "2.0"
    assert rows_of(replace(before, samples={}, error="gone"), now)[0]["steps/s"] == "0.0"


BUSY = {
    "server": "blackjack http://127.0.0.1:8000",
    "slots": "1024/1024",
    "waiting": "12",
    "steps/s": "12345.6",
    "in environment": "50%",
    "errors/s": "EXECUTION_ERROR 0.5 CAPACITY_REACHED 12",
}


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 160])
def test_tables_fit_the_terminal_and_break_no_value(columns: int) -> None:
    lost = {"server": "http://127.0.0.1:9", "error": "connection refused, and more than one line about why"}
    lines = "\n".join(lines_of([BUSY, BUSY, lost], columns)).splitlines()
    assert max(map(len, lines)) <= columns
    for text in ("blackjack http://127.0.0.1:8000", "1024/1024", "12345.6", "in environment"):
        assert any(text in line for line in lines), text
    assert ("slots 1024/1024" in "\n".join(lines)) == (columns < 160)  # or below their heading


def test_without_a_terminal_it_ends_if_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert main.run(COMMAND, [url, "--interval", "0.01"]) == 1
    assert capsys.readouterr().out.count("refused") == 1


def test_quantiles_are_interpolated_within_a_bucket() -> None:
    buckets = [(1.0, 0.0), (2.0, 10.0), (4.0, 20.0), (float("inf"), 20.0)]
    assert [quantile(buckets, share) for share in (0.05, 0.5, 0.75)] == [1.1, 2.0, 3.0]
    assert quantile([(1.0, 0.0), (float("inf"), 5.0)], 0.9) == 1.0
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.9) is None


async def test_without_a_terminal_lines_and_a_status_are_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def top(*words: str) -> tuple[int, list[str]]:
        status = main.run(COMMAND, [*words, "--once", "--interval", "0.01"])
        return status, [line[9:] for line in capsys.readouterr().out.splitlines()]

    # Whoever answers may say anything.
    with served(lambda: snapshot(name="se\x1b[2Jven"), tmp_path) as run:
        async with serving(app_of(Counter, tokens=(TOKEN,))) as address:
            monkeypatch.setenv("ROPEWALK_TOKEN", TOKEN)
            status, lines = await asyncio.to_thread(top, f"http://{address}", f"http://{run}")
            assert status == 0
            assert lines[0].startswith(f"server counter http://{address}, slots 0/4, waiting 0, steps/s 0.0")
            assert lines[1:] == [
                f"run seven http://{run}, trained 12/150, served 11, groups leased 2 finished 3 trained 96 dropped 1, "
                "calls 7, restarts 2, reward/mean -0.25"
            ]
            monkeypatch.delenv("ROPEWALK_TOKEN")
            status, lines = await asyncio.to_thread(top, f"http://{address}")
            assert (status, lines[0].endswith("got HTTP 401; give its token in ROPEWALK_TOKEN")) == (1, True)
        status, lines = await asyncio.to_thread(top, f"http://{address}")
        assert (status, "refused" in lines[0]) == (1, True)
    assert main.run(COMMAND, ["--interval", "0"]) == main.run(COMMAND, ["nowhere"]) == 2


@pytest.mark.slow
def test_ctrl_c_restores_the_terminal() -> None:
    """A dumb one gets lines."""
    with serve("--workers", "2") as server:
        words = (f"http://{server.address}", "--interval", "0.1")
        with in_terminal(*words, program=PROGRAM, COLUMNS="160") as terminal:
            terminal.until("worker 1")
            terminal.interrupt()
            assert terminal.ended() == 130
            assert terminal.raw.rindex("\x1b[?1049l") > terminal.raw.rindex("\x1b[?1049h")
            assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")
            assert "Traceback" not in terminal.raw
        with in_terminal(*words, program=PROGRAM, TERM="dumb") as terminal:
            terminal.until("slots 0/")
            terminal.interrupt()
            assert terminal.ended() == 130
            assert "\x1b" not in terminal.raw
