"""`ropewalk gateway` in front of the real `vllm serve`: an episode's rows are what the server sampled."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "generator"))  # the server

import torch
from vllm_server import START_S, vllm_serve

from rl_bridge.cli import gateway
from rl_bridge.errors import ConfigError

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(500)]

TEMPERATURE = 0.7


def parse(path: Path, url: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gateway.COMMAND.configure(parser)
    limits = ["--max-length", "64", "--max-tokens", "6", "--temperature", str(TEMPERATURE)]
    return parser.parse_args([str(path), "--endpoint", url, "--name", "tiny", *limits])


async def test_rows_of_an_episode_have_the_servers_tokens_and_logprobs(
    tiny_policy: Path, engine_environment: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Qwen3ForCausalLM

    options = ["--max-model-len", "64", "--logprobs-mode", "processed_logprobs"]
    with vllm_serve(tiny_policy, tmp_path / "log", *options) as url:
        serving = asyncio.ensure_future(gateway.serve(parse(tiny_policy, url)))
        try:
            async with asyncio.timeout(START_S):
                while not (printed := capsys.readouterr().out):
                    assert not serving.done(), serving.result()
                    await asyncio.sleep(0.1)
            trace = await play(*printed.split()[:: len(printed.split()) - 1])
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    (row,) = trace["rows"]
    assert [(call["parent"], call["trained"]) for call in trace["calls"]] == [
        (None, True),
        (0, True),
        (1, True),
    ]
    assert len(row["answers"]) == 3
    model = Qwen3ForCausalLM.from_pretrained(str(tiny_policy), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([row["tokens"]])).logits[0] / TEMPERATURE
    expected = torch.log_softmax(logits, -1)
    for begin, end in row["answers"]:
        for place in range(begin, end):
            token = row["tokens"][place]
            assert row["logprobs"][place] == pytest.approx(expected[place - 1, token].item(), abs=1e-4)


async def play(url: str, key: str) -> Any:
    """Play an episode of three turns; returns its trace."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        owner = {"authorization": f"Bearer {key}"}
        agent = (await http.post("/episodes", headers=owner)).json()["key"]
        chat: list[Any] = []
        for word in ("total=8", "ace=no", "dealer=3"):
            chat.append({"role": "user", "content": word})
            body = {"messages": chat}
            headers = {"authorization": f"Bearer {agent}"}
            reply = (await http.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()
            chat.append(reply.json()["choices"][0]["message"])
        return (await http.post("/episodes/end", json={"key": agent, "reward": 1}, headers=owner)).json()


async def test_server_with_other_logprobs_is_refused_at_the_start(
    tiny_policy: Path, engine_environment: None, tmp_path: Path
) -> None:
    with (
        vllm_serve(tiny_policy, tmp_path / "log", "--max-model-len", "64") as url,
        pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"),
    ):
        async with asyncio.timeout(START_S):
            await gateway.serve(parse(tiny_policy, url))
