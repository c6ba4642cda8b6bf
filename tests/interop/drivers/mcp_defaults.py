"""Every verb of MCP at a URL, by a client at its defaults: `mcp`'s or `fastmcp`'s. Prints what each gave, as JSON."""

import asyncio
import importlib
import json
import sys
from typing import Any

PLANS: dict[str, Any] = {"shop": ("search_products", {"text": "e"}), "sqlite": ("list_tables", {})}


def items_of(answer: Any, name: str) -> list[Any]:
    """fastmcp gives a list, mcp a result that has it."""
    return list(getattr(answer, name, answer))


async def main(package: str, url: str, name: str) -> dict[str, Any]:
    client = importlib.import_module(package).Client
    tool, arguments = PLANS[name]
    async with client(url) as host:
        tools = [one.name for one in items_of(await host.list_tools(), "tools")]
        called = await host.call_tool(tool, arguments)
        (resource,) = items_of(await host.list_resources(), "resources")
        read = items_of(await host.read_resource(resource.uri), "contents")
        (prompt,) = items_of(await host.list_prompts(), "prompts")
        given = {one.name: "1" for one in prompt.arguments or ()}
        messages = (await host.get_prompt(prompt.name, given)).messages
        return {
            "tool": tool in tools,
            "called": len(called.content) > 0 and not called.is_error,
            "read": len(read[0].text) > 0,
            "prompted": len(messages) > 0,
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
