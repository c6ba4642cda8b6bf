"""verifiers' own `openenv` taskset plays our server, with the stand-in for the two released names that it imports."""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from missing import missing
from module_run import finished
from serve_process import serve

from openenv_core import GenericEnvClient

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venvs" / "verifiers"
PAGE = ROOT / "docs" / "trainers.md"
HANDS = 20
PATIENCE_S = 300
# The trainer's chat program has its packages installed by uv; they are in its virtual environment already.
UV = f"""#!/bin/sh
case "$*" in *--help*) echo "--script" ;; "python find"*) echo "{VENV}/bin/python" ;; esac
"""


@contextmanager
def endpoint(answer: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """An endpoint of the OpenAI protocol, whose answers are streamed; `answer` gets what the last prompt says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = answer(json.loads(requests["messages"][-1]["content"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            about = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": requests["model"]}
            for delta, reason in (({"role": "assistant", "content": text}, None), ({}, "stop")):
                chunk = {**about, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self.wfile.write(f"data: {json.dumps({**about, 'choices': [], 'usage': usage})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def play(folder: Path, server: str, model: str, resets: str) -> list[float]:
    """Run what the page shows, with these addresses and resets, and return the episodes' rewards."""
    if not (VENV / "bin" / "vf-eval").is_file():
        missing("needs verifiers in .venvs; python3.11 scripts/bootstrap.py verifiers makes it")
    page = PAGE.read_text()
    config, command = (
        re.findall(rf"^```{kind}\n(.*?)^```", page.partition("## verifiers")[2], re.M | re.S)[0]
        for kind in ("toml", "bash")
    )
    config = config.replace("localhost:8000", server).replace("localhost:8001", model)
    (folder / "blackjack.toml").write_text(re.sub(r"^resets = .*$", f"resets = {resets}", config, flags=re.M))
    uv = folder / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join((str(VENV / "bin"), str(folder), os.environ["PATH"]))
    words = [str(VENV / "bin" / "python"), *command.split()[1:], "--no-rich", "--output-dir", "out"]
    variables = {"PYTHONPATH": str(ROOT), "PATH": path, "HOME": str(folder)}
    done = finished(*words, cwd=folder, env=inherited | variables, timeout_s=PATIENCE_S)
    (traces,) = (*folder.glob("out/*/traces.jsonl"), *([] if done.returncode == 0 else [Path(done.stderr)]))
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    assert all(episode["ok"] for episode in episodes), episodes
    return [episode["traces"][0]["rewards"]["openenv_reward"]["score"] for episode in episodes]


@pytest.mark.skipif(sys.platform != "linux", reason="the chat program runs below a shell")
def test_twenty_hands_have_the_mean_reward_that_the_server_gave(tmp_path: Path) -> None:
    def answer(prompt: dict[str, Any]) -> str:
        return json.dumps({"action": "hit" if prompt["observation"]["player_total"] < 15 else "stand"})

    resets = ", ".join(f"{{ seed = {seed} }}" for seed in range(HANDS))
    with serve(app="envs.blackjack_env.server.app:app") as server, endpoint(answer) as model:
        rewards = play(tmp_path, server.address, model, f"[{resets}]")
        expected_rewards = []
        with GenericEnvClient(f"http://{server.address}").sync() as client:
            for seed in range(HANDS):
                result = client.reset(seed=seed)
                while not result.done:
                    result = client.step(json.loads(answer({"observation": result.observation})))
                expected_rewards.append(result.reward)
    assert len(rewards) == HANDS
    assert sum(rewards) / HANDS == sum(expected_rewards) / HANDS
    assert sorted(rewards) == sorted(expected_rewards)


def test_tools_of_an_environment_are_shown_and_called(tmp_path: Path) -> None:
    requests = []

    def answer(prompt: dict[str, Any]) -> str:
        requests.append(prompt)
        tool = prompt["action_schema"]["available_tools"][0]
        return json.dumps({"tool_name": tool["name"], "arguments": {}})

    with serve(app="envs.shop_env.server.app:app") as server, endpoint(answer) as model:
        assert play(tmp_path, server.address, model, "[{ seed = 1, max_calls = 2 }]") == [0.0]
    assert "task" in requests[0]["observation"]
    assert (
        requests[1]["observation"]["tool_name"] == requests[0]["action_schema"]["available_tools"][0]["name"]
    )
