"""docs/tools.md and docs/mcp.md: their examples run, and their commands and names are those of the code."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from serving import request, serving
from toolbox import toolbox_app

import openenv_core.tools
from openenv_core.tools import ToolContext, ToolErrorType
from servers.cli.mcp import COMMAND

ROOT = Path(__file__).parents[2]
TOOLS_PAGE = ROOT / "docs" / "tools.md"
TOOLS = TOOLS_PAGE.read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_is_about() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", TOOLS, flags=re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", block]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "invalid_args 0.0\n{'ada': 20, 'bob': 10} 1.0\n", done.stderr


def test_what_it_names_is_there() -> None:
    for name in re.findall(r"`((?:Tool|Text|Image|Audio|Embedded|ResourceLink|PromptMessage)\w*)\b", TOOLS):
        assert hasattr(openenv_core.tools, name), name
    for name in re.findall(r"`(?:await )?context\.(\w+)", TOOLS):
        assert hasattr(ToolContext, name), name
    told = {
        kind
        for row in TOOLS.splitlines()
        if row.startswith("|")
        for kind in re.findall(r"`(\w+_\w+|timeout)`", row)
    }
    assert told >= set(ToolErrorType)
    for target in re.findall(r"\]\(([^)#]+)\)", TOOLS):
        assert (TOOLS_PAGE.parent / target).resolve().exists(), target


MCP = (ROOT / "docs" / "mcp.md").read_text(encoding="utf-8")
MCP_TUTORIAL = (ROOT / "docs" / "tutorials" / "mcp.md").read_text(encoding="utf-8")


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return parser.parse_args(words)


def test_what_hosts_are_told_to_start_can_be_started() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", MCP_TUTORIAL, flags=re.MULTILINE | re.DOTALL)
    in_page, in_help = json.loads(block), json.loads(COMMAND.examples[-1])
    for settings in (in_page, in_help):
        server = settings["mcpServers"]["shop"]
        assert server["command"] == "ropewalk"
        assert server["args"][0] == "mcp"
        assert parsed(server["args"][1:]).seed == 7
    commands = re.findall(
        r"ropewalk mcp (.*?)(?:\s{2,}.*|`.*)?$", MCP_TUTORIAL + "\n".join(COMMAND.examples), re.MULTILINE
    )
    assert commands
    for words in commands:
        parsed(shlex.split(words))


async def test_its_request_opens_a_session() -> None:
    (body,) = re.findall(r"^curl -X POST \S+/mcp -d '(.*)'$", MCP, flags=re.MULTILINE)
    app = toolbox_app()
    async with serving(app) as address:
        form = {"content-type": "application/x-www-form-urlencoded"}  # as curl says
        reply = await request(address, "POST", "/mcp", body, form)
        assert [session.id for session in app.sessions.standing] == [reply.json()["result"]["session_id"]]
