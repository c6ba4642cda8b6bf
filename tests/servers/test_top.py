"""`ropewalk top`: its figures are those of the time between two looks; a terminal is left as it was found."""

import asyncio
import json

import httpx
import pytest
from counter import Counter
from serve_process import serve
from server_apps import app_of, step
from serving import ask, serving, socket_to
from terminal_process import in_terminal
from test_metrics import TOKEN

from openenv_core.cli import main
from servers.cli.top import COMMAND, Look, figures, look, quantile

RUN = "import sys; from openenv_core.cli import main; from servers.cli.top import COMMAND; "
PROGRAM = ("-c", f"{RUN}sys.exit(main.run(COMMAND, sys.argv[1:]))")


async def test_figures_are_of_the_time_between_two_looks() -> None:
    async with serving(app_of(Counter)) as address, socket_to(address) as socket:
        with httpx.Client(trust_env=False) as client:
            await ask(socket, {"type": "reset"})
            before = await asyncio.to_thread(look, client, f"http://{address}")
            for _ in range(5):
                await ask(socket, step())
            await ask(socket, step())
            now = await asyncio.to_thread(look, client, f"http://{address}")
        told = figures(before, Look(now.url, before.at + 2.0, now.samples, now.environment))
    assert told["environment"] == "counter"
    assert (told["slots"], told["in_use"], told["waiting"]) == (4, 1, 0)
    assert (told["steps_per_s"], told["resets_per_s"]) == (2.5, 0)
    assert told["errors_per_s"] == {"EXECUTION_ERROR": 0.5}
    assert told["workers"] == [{"in_use": 1, "steps_per_s": 2.5}]
    assert 0 < told["step_p50_s"] <= told["step_p99_s"]
    assert 0 < told["environment_share"] < 1
    assert told["received_bytes_per_s"] == 6 * len(json.dumps(step())) / 2
    # A server that was started again has counted from zero since.
    fewer = {**now.samples, ("ropewalk_call_seconds_count", "step"): 2.0}
    assert figures(now, Look(now.url, now.at + 1.0, fewer))["steps_per_s"] == 2


def test_quantiles_lie_evenly_within_a_bucket() -> None:
    buckets = [(1.0, 0.0), (2.0, 10.0), (4.0, 20.0), (float("inf"), 20.0)]
    assert [quantile(buckets, share) for share in (0.05, 0.5, 0.75)] == [1.1, 2.0, 3.0]
    assert quantile([(1.0, 0.0), (float("inf"), 5.0)], 0.9) == 1.0
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.9) is None


async def test_scripts_get_lines_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(app_of(Counter, tokens=(TOKEN,))) as address:
        words = [f"http://{address}", "--once", "--interval", "0.01"]
        assert await asyncio.to_thread(main.run, COMMAND, [*words, "--json", "--token", TOKEN]) == 0
        assert json.loads(capsys.readouterr().out)["slots"] == 4
        assert await asyncio.to_thread(main.run, COMMAND, [*words, "--json"]) == 1
        assert "give its --token" in json.loads(capsys.readouterr().out)["error"]
        assert await asyncio.to_thread(main.run, COMMAND, [*words, "--token", TOKEN]) == 0
        assert "0/4" in capsys.readouterr().out
    assert await asyncio.to_thread(main.run, COMMAND, [*words, "--json"]) == 1
    assert main.run(COMMAND, ["--interval", "0"]) == main.run(COMMAND, ["nowhere"]) == 2


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    with (
        serve("--workers", "2") as server,
        in_terminal(
            f"http://{server.address}", "--interval", "0.1", program=PROGRAM, COLUMNS="160"
        ) as terminal,
    ):
        terminal.until("worker 1")
        terminal.interrupt()
        assert terminal.ended() == 130
        assert terminal.raw.rindex("\x1b[?1049l") > terminal.raw.rindex("\x1b[?1049h")
        assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")
        assert "Traceback" not in terminal.raw
