"""docs/mcp.md: the commands in it are ones that there are, and its request opens a session."""

import argparse
import json
import re
import shlex
from pathlib import Path

from serving import request, serving
from toolbox import boxes

from servers.cli.mcp import COMMAND

TEXT = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text(encoding="utf-8")


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return parser.parse_args(words)


def test_what_hosts_are_told_to_start_can_be_started() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    in_page, in_help = json.loads(block), json.loads(COMMAND.examples[-1])
    for settings in (in_page, in_help):
        server = settings["mcpServers"]["shop"]
        assert server["command"] == "ropewalk"
        assert server["args"][0] == "mcp"
        assert parsed(server["args"][1:]).seed == 7
    commands = re.findall(
        r"ropewalk mcp (.*?)(?:\s{2,}.*|`.*)?$", TEXT + "\n".join(COMMAND.examples), re.MULTILINE
    )
    assert commands
    for words in commands:
        parsed(shlex.split(words))


async def test_its_request_opens_a_session() -> None:
    (body,) = re.findall(r"^curl -X POST \S+/mcp -d '(.*)'$", TEXT, flags=re.MULTILINE)
    app = boxes()
    async with serving(app) as address:
        form = {"content-type": "application/x-www-form-urlencoded"}  # as curl says
        reply = await request(address, "POST", "/mcp", body, form)
        assert [session.id for session in app.sessions.standing] == [reply.json()["result"]["session_id"]]
