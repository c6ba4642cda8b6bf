"""What environments of tools answer about their tools."""

from typing import Any

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.drawing.actions import is_of_tools
from openenv_core.checker.schemas import fault_of
from openenv_core.checker.subject import Subject
from openenv_core.errors import ServerError
from openenv_core.tools import RESERVED_TOOL_NAMES

NO_SUCH_TOOL = "ropewalk_no_such_tool"


@check(Level.RUNTIME)
def check_tools_listed(subject: Subject) -> str:
    """The tools that are listed have names of their own and schemas, and are those that the manifest declares."""
    tools = _tools(subject)
    names = [str(tool.get("name")) for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CheckFailed(
            f"expected each tool once, got {', '.join(twice)} several times", change="rename or remove one"
        )
    if reserved := sorted(RESERVED_TOOL_NAMES & set(names)):
        raise CheckFailed(
            f"expected tools with names of their own, got {', '.join(reserved)}",
            change=f"rename them: {', '.join(sorted(RESERVED_TOOL_NAMES))} are what clients call themselves",
        )
    for tool in tools:
        schema = tool.get("input_schema") or tool.get("inputSchema") or {}
        if fault := fault_of(schema):
            raise CheckFailed(
                f"expected a JSON schema of the arguments of {tool.get('name')}, got: {fault.message}",
                change="describe the tool's arguments",
            ) from fault
    declared = set(subject.promises.validation.capabilities.declared_tools)
    if declared and declared != set(names):
        raise CheckFailed(
            f"expected the tools that the manifest declares, {', '.join(sorted(declared))}, "
            f"got {', '.join(sorted(names)) or 'none'}",
            change="correct validation.capabilities.declared_tools in openenv.yaml",
        )
    return ", ".join(names)


@check(Level.RUNTIME)
def check_unknown_tool(subject: Subject) -> None:
    """A call of a tool that is not there comes back as an observation that says so."""
    _tools(subject)
    change = "answer with CallToolObservation(tool_name=..., error=ToolError(error_type=TOOL_NOT_FOUND, ...))"
    with subject.client() as client:
        subject.reset(client)
        try:
            result = client.step({"type": "call_tool", "tool_name": NO_SUCH_TOOL, "arguments": {}})
        except ServerError as error:
            raise CheckFailed(
                f"expected an observation with an error for a tool that is not there, got {error}",
                change=change,
            ) from error
    found = result.observation.get("error")
    if not isinstance(found, dict) or not found.get("error_type"):
        raise CheckFailed(
            f"expected error.error_type in the observation for a tool that is not there, got {found!r:.200}",
            change=change,
        )


def _tools(subject: Subject) -> list[dict[str, Any]]:
    if not is_of_tools(subject.schema["action"]):
        raise NotApplicable("its actions are no calls of tools")
    with subject.client() as client:
        subject.reset(client)
        try:
            found = client.step({"type": "list_tools"}).observation.get("tools")
        except ServerError as error:
            raise CheckFailed(
                f"expected the list of tools for the action list_tools, got {error}",
                change="let the action be a union of ListToolsAction and CallToolAction, and step answer both",
            ) from error
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise CheckFailed(
            f"expected the list of tools for the action list_tools, got {found!r:.200}",
            change="answer with ListToolsObservation(tools=[...])",
        )
    return found
