"""docs/tools.md and docs/mcp.md: their examples run, and their commands and names are those of the code."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from module_run import finished
from serving import request, serving
from toolbox import toolbox_app

import openenv_core.tools
from openenv_core.tools import ToolContext, ToolErrorType
from servers.cli.mcp import COMMAND

ROOT = Path(__file__).parents[2]
TOOLS = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_is_about() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", TOOLS, flags=re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", block]
    done = finished(*command, cwd=ROOT, timeout_s=60)
    assert done.stdout == "invalid_args 0.0\n{'ada': 20, 'bob': 10} 1.0\n", done.stderr


def test_named_classes_and_error_types_exist() -> None:
    for name in re.findall(r"`((?:Tool|Text|Image|Audio|Embedded|ResourceLink|PromptMessage)\w*)\b", TOOLS):
        assert hasattr(openenv_core.tools, name), name
    for name in re.findall(r"`(?:await )?context\.(\w+)", TOOLS):
        assert hasattr(ToolContext, name), name
    documented = {
        kind
        for row in TOOLS.splitlines()
        if row.startswith("|")
        for kind in re.findall(r"`(\w+_\w+|timeout)`", row)
    }
    assert documented >= set(ToolErrorType)


MCP = (ROOT / "docs" / "mcp.md").read_text(encoding="utf-8")
MCP_TUTORIAL = (ROOT / "docs" / "tutorials" / "mcp.md").read_text(encoding="utf-8")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return parser.parse_args(argv)


def test_shown_host_commands_are_valid() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", MCP_TUTORIAL, flags=re.MULTILINE | re.DOTALL)
    in_page, in_help = json.loads(block), json.loads(COMMAND.examples[-1])
    for settings in (in_page, in_help):
        server = settings["mcpServers"]["shop"]
        assert server["command"] == "ropewalk"
        assert server["args"][0] == "mcp"
        assert parse_arguments(server["args"][1:]).seed == 7
    commands = re.findall(
        r"ropewalk mcp (.*?)(?:\s{2,}.*|`.*)?$", MCP_TUTORIAL + "\n".join(COMMAND.examples), re.MULTILINE
    )
    assert commands
    for words in commands:
        parse_arguments(shlex.split(words))


async def test_its_request_opens_a_session() -> None:
    (body,) = re.findall(r"^curl -X POST \S+/mcp -d '(.*)'$", MCP, flags=re.MULTILINE)
    app = toolbox_app()
    async with serving(app) as address:
        form = {"content-type": "application/x-www-form-urlencoded"}  # as curl says
        reply = await request(address, "POST", "/mcp", body, form)
        assert [session.id for session in app.sessions.standing] == [reply.json()["result"]["session_id"]]
