"""docs/tools.md and docs/mcp.md: their examples run, and their commands and names are those of the code."""

import argparse
import json
import re
import shlex

from doc_pages import blocks, page, printed
from serving import request, serving
from toolbox import toolbox_app

import openenv_core.tools
from openenv_core.tools import ToolContext, ToolErrorType
from servers.cli.mcp import COMMAND

TOOLS = page("docs/tools.md")
MCP = page("docs/mcp.md")
MCP_TUTORIAL = page("docs/tutorials/mcp.md")


def test_the_example_prints_what_the_page_is_about() -> None:
    (block,) = blocks(TOOLS, "python")
    assert printed(block) == "invalid_args 0.0\n{'ada': 20, 'bob': 10} 1.0\n"


def test_named_classes_and_error_types_exist() -> None:
    for name in re.findall(r"`((?:Tool|Text|Image|Audio|Embedded|ResourceLink|PromptMessage)\w*)\b", TOOLS):
        assert hasattr(openenv_core.tools, name), name
    for name in re.findall(r"`(?:await )?context\.(\w+)", TOOLS):
        assert hasattr(ToolContext, name), name
    rows = "\n".join(row for row in TOOLS.splitlines() if row.startswith("|"))
    documented = set(re.findall(r"`(\w+_\w+|timeout)`", rows))
    assert documented >= set(ToolErrorType)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return parser.parse_args(argv)


def test_shown_host_commands_are_valid() -> None:
    (block,) = blocks(MCP_TUTORIAL, "json")
    in_page, in_help = json.loads(block), json.loads(COMMAND.examples[-1])
    for settings in (in_page, in_help):
        server = settings["mcpServers"]["shop"]
        assert (server["command"], server["args"][0]) == ("ropewalk", "mcp")
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
