"""An MCP server over stdio that misbehaves on request. Uses only the standard library, so it starts fast.

python -I -S tool_server.py [--start-s SECONDS] [--name NAME] [--endless] [--long]
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

OBJECT = {"type": "object"}


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    schema = {**OBJECT, "properties": properties, "required": list(properties)}
    return {"name": name, "description": f"What {name} does", "inputSchema": schema}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
TOOLS = {
    entry["name"]: entry
    for entry in (
        tool("echo", text=TEXT),
        tool("count"),
        tool("about"),
        tool("die", code=NUMBER),
        tool("hang", seconds=NUMBER),
        tool("wedge", seconds=NUMBER),
        tool("big", size=NUMBER),
        tool("garbage", line=TEXT),
        tool("chatter", line=TEXT),
        tool("fail", text=TEXT),
        tool("refuse", code=NUMBER),
        tool("spawn"),
        tool("add", name=TEXT),
        tool("remove", name=TEXT),
        tool("quietly_remove", name=TEXT),
        tool("blocks"),
        tool("reset"),
        tool("heard"),
    )
}
state = {"count": 0}
heard: list[str] = []
"""Methods of the received notifications."""


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], **more}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    if name not in TOOLS:
        return text(f"MCP error -32602: Tool {name} not found", isError=True)
    match name:
        case "count":
            state["count"] += 1
            return text(str(state["count"]), structuredContent={"result": state["count"]})
        case "about":
            description = {
                "pid": os.getpid(),
                "cwd": os.getcwd(),
                "environ": dict(os.environ),
                "argv": sys.argv[1:],
            }
            return text(json.dumps(description), structuredContent=description)
        case "heard":
            return text(json.dumps(heard), structuredContent={"result": heard})
        case "die":
            sys.stderr.write("I am dying\n")
            sys.stderr.flush()
            os._exit(int(arguments["code"]))
        case "hang":  # other messages are handled meanwhile
            return None
        case "wedge":  # no other message is handled meanwhile
            time.sleep(arguments["seconds"])
            return text("awake")
        case "big":
            return text("x" * int(arguments["size"]))
        case "garbage":
            sys.stdout.write(arguments["line"] + "\n")
            sys.stdout.flush()
            return None
        case "chatter":
            sys.stdout.write(arguments["line"] + "\n")
            return text("said it")
        case "fail":
            return text(arguments["text"], isError=True)
        case "spawn":
            child = subprocess.Popen(["setsid", "sleep", "600"], stdin=subprocess.DEVNULL)
            return text(str(child.pid))
        case "add" | "remove" | "quietly_remove":
            if name == "add":
                TOOLS[arguments["name"]] = tool(arguments["name"], text=TEXT)
            else:
                TOOLS.pop(arguments["name"])
            if name != "quietly_remove":
                say({"method": "notifications/tools/list_changed"})
            return text("done")
        case "blocks":
            image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
            if "--odd" in sys.argv:
                return {
                    "content": [{"type": "text", "text": "one"}, {"type": "video", "data": "aGk="}, 7, image]
                }
            return {"content": [{"type": "text", "text": "one"}, image]}
    return text(arguments.get("text", "done"))


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        return {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "fixture", "version": "1"},
        }
    if method == "tools/list" and "--endless" in sys.argv:
        time.sleep(0.05)
        return {"tools": [], "nextCursor": "more"}
    if method == "tools/list" and "--long" in sys.argv:
        return {"tools": [{**tool(f"long{n}"), "description": "x" * 100_000} for n in range(100)]}
    if method == "tools/list" and "--odd" in sys.argv:
        odd = [{"name": "either", "inputSchema": {"anyOf": [{"type": "object"}]}}, {"name": 5}, "nothing"]
        return {"tools": [*odd, TOOLS["blocks"]]}
    if method == "tools/list":
        return {"tools": list(TOOLS.values())}
    if method == "tools/call":
        return call(params["name"], params.get("arguments") or {})
    return {}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        method, params = message.get("method"), message.get("params") or {}
        if method == "tools/call" and params["name"] == "refuse":
            code = int(params["arguments"]["code"])
            say({"id": message["id"], "error": {"code": code, "message": f"refused with {code}"}})
        elif "id" in message and (result := answer(method, params)) is not None:
            say({"id": message["id"], "result": result})
        elif "id" not in message:
            heard.append(method)


if __name__ == "__main__":
    if "--start-s" in sys.argv:
        time.sleep(float(sys.argv[sys.argv.index("--start-s") + 1]))
    main()
