"""The client under test, as a command: `conformance_client.py URL`, which a suite starts anew for each scenario."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mcp import Client

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
    """Do what the scenario wants of a client: list the tools, and call them."""
    scenario = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    async with Client(url) as client:
        schemas = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        if scenario in ONLY_LISTED:
            return
        for name, arguments in calls(schemas, context):
            try:
                answer: object = await client.call_tool(name, arguments)
            except Exception as error:
                answer = error
            sys.stdout.write(f"{name}: {answer!r}\n")  # the suite keeps it beside its checks


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
    """Return the least that a schema wants."""
    properties = schema.get("properties", {})
    return {name: STUBS.get(properties.get(name, {}).get("type"), "x") for name in schema.get("required", [])}


def run(url: str) -> None:
    """Do it to the end."""
    asyncio.run(main(url))


if __name__ == "__main__":
    run(sys.argv[1])
