"""The client under test, as a command: `conformance_client.py URL`; a suite starts it once per scenario.

It is the connection that envs/mcp_tools_env has to a tool server at an address, as the environment opens it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from envs.mcp_tools_env.server.upstream.connection import UpstreamConnection
from envs.mcp_tools_env.server.upstream.errors import CallError, UpstreamWire
from envs.mcp_tools_env.server.upstream.http import make_http_wire
from openenv_core.tools import SILENT

TIMEOUT_S = 60.0
# As in the configuration of a server: "protocol" as it is by default, the handshake first, and as "stateless".
DEFAULT, STATELESS = ("legacy", "auto"), ("auto",)
# These look at the first request too, which of a client that begins with the handshake is none of the stateless wire.
ONLY_STATELESS = ("request-metadata", "http-standard-headers")
# What scenarios want to be called with, where it is not what a schema alone leads to.
WANTED: Mapping[str, Mapping[str, Any]] = {"add_numbers": {"a": 5, "b": 3}}
STUBS: Mapping[str, Any] = {
    "string": "x",
    "integer": 0,
    "number": 0,
    "boolean": False,
    "object": {},
    "array": [],
}
ONLY_LISTED = ("initialize", "json-schema-ref-no-deref")


async def main(url: str) -> None:
    """List the tools, and call them, as the scenario requires."""
    scenario = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    modes = STATELESS if scenario in ONLY_STATELESS else DEFAULT

    async def open_wire() -> UpstreamWire:
        return make_http_wire(url, {}, allow_private=True)

    connection = UpstreamConnection(open_wire, modes)
    await connection.open(TIMEOUT_S)
    try:
        schemas = {tool.name: tool.input_schema for tool in await connection.list_tools(TIMEOUT_S)}
        if scenario in ONLY_LISTED:
            return
        for name, arguments in calls(schemas, context):
            try:
                answer: object = await connection.call(name, arguments, TIMEOUT_S, SILENT)
            except CallError as error:
                answer = error
            sys.stdout.write(f"{name}: {answer!r}\n")  # the suite keeps it beside its checks
    finally:
        await connection.close()


def calls(
    schemas: Mapping[str, Mapping[str, Any]], context: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what to call, with which arguments."""
    if "toolCalls" in context:
        for call in context["toolCalls"]:
            if call["name"] in schemas:
                yield call["name"], call.get("arguments") or {}
    elif "json_schema_echo" in schemas:
        yield "json_schema_echo", {"schema": schemas["json_schema_2020_12_tool"]}
    else:
        for name, schema in schemas.items():
            yield name, dict(WANTED.get(name, {})) or stubs(schema)


def stubs(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a minimal value for a schema."""
    properties = schema.get("properties", {})
    return {name: STUBS.get(properties.get(name, {}).get("type"), "x") for name in schema.get("required", [])}


def run(url: str) -> None:
    """Do it to the end."""
    asyncio.run(main(url))


if __name__ == "__main__":
    run(sys.argv[1])
