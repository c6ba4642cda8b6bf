"""An environment with every tool, resource and prompt that the conformance suites request by name."""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from openenv_core import Observation, State
from openenv_core.tools import (
    AskingUnavailableError,
    Audio,
    Content,
    DeclaredTools,
    Elicit,
    Embedded,
    Image,
    PromptMessage,
    Request,
    Roots,
    Sample,
    Text,
    ToolAction,
    ToolContext,
    ToolEnvironment,
    ToolFailedError,
    ToolSpec,
    completion,
    prompt,
    resource,
    tool,
)
from servers import create_app

PAUSE_S = 0.05
# One pixel, and one sample.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg=="
)
WAV = b"RIFF&\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0\2\0\x10\0data\2\0\0\0\0\0"


def form(**types: str) -> dict[str, Any]:
    """Return the schema of a form with these fields, all required."""
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in types.items()},
        "required": list(types),
    }


def _titled(**titles: str) -> list[dict[str, str]]:
    return [{"const": value, "title": title} for value, title in titles.items()]


PERSON = form(username="string", email="string")
DEFAULTS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": True},
    },
}
CHOICES = {
    "type": "object",
    "properties": {
        "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
        "titledSingle": {"type": "string", "oneOf": _titled(value1="First Option", value2="Second Option")},
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {
            "type": "array",
            "items": {"type": "string", "enum": ["option1", "option2", "option3"]},
        },
        "titledMulti": {
            "type": "array",
            "items": {"anyOf": _titled(value1="First Choice", value2="Second Choice")},
        },
    },
}
SCHEMA_2020_12 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}

NAME = form(name="string")


class Asking(DeclaredTools):
    """What the suites ask for by the name of the result that such a call has."""

    @tool
    async def test_input_required_result_elicitation(self, context: ToolContext) -> str:
        """Ask for a name."""
        answer = await context.elicit("What is your name?", NAME, "user_name")
        return f"Hello, {answer['content']['name']}!"

    @tool
    async def test_input_required_result_sampling(self, context: ToolContext) -> str:
        """Ask the caller's language model under a name."""
        answer = await context.sample("What is the capital of France?", 100, "capital_question")
        return f"The model said: {answer['content']['text']}"

    @tool
    async def test_input_required_result_list_roots(self, context: ToolContext) -> str:
        """Ask where the caller works."""
        answer = await context.roots("client_roots")
        return ", ".join(root["uri"] for root in answer["roots"])

    @tool
    async def test_input_required_result_request_state(self, context: ToolContext) -> str:
        """Ask for a confirmation."""
        answer = await context.elicit("Please confirm", form(ok="boolean"), "confirm")
        return f"state-ok: {answer['action']}"

    @tool
    async def test_input_required_result_tampered_state(self, context: ToolContext) -> str:
        """Ask for a confirmation that nobody may forge."""
        answer = await context.elicit("Please confirm", form(ok="boolean"), "confirm")
        return f"confirmed: {answer['action']}"

    @tool
    async def test_input_required_result_multiple_inputs(self, context: ToolContext) -> str:
        """Ask three things at once."""
        answers = await context.ask(
            {
                "user_name": Elicit(message="What is your name?", schema=NAME),
                "greeting": Sample(messages="Generate a greeting", max_tokens=50),
                "client_roots": Roots(),
            }
        )
        return f"answered: {', '.join(sorted(answers))}"

    @tool
    async def test_input_required_result_multi_round(self, context: ToolContext) -> str:
        """Ask one thing after the other."""
        first = await context.elicit("Step 1: What is your name?", NAME, "step1")
        second = await context.elicit("Step 2: What is your favorite color?", form(color="string"), "step2")
        return f"{first['content']['name']} likes {second['content']['color']}."

    @tool
    async def test_input_required_result_capabilities(self, context: ToolContext) -> str:
        """Ask only what the caller can be asked."""
        sample = Sample(messages="Say hello", max_tokens=50)
        elicit = Elicit(message="What is your name?", schema=NAME)
        wishes: list[dict[str, Request]] = [
            {"sample": sample, "ask": elicit},
            {"sample": sample},
            {"ask": elicit},
        ]
        for wish in wishes:
            try:
                return f"answered: {', '.join(sorted(await context.ask(wish)))}"
            except AskingUnavailableError:
                continue
        return "nobody to ask"

    @prompt
    async def test_input_required_result_prompt(self, context: ToolContext) -> str:
        """A prompt that asks back."""
        question = "What context should the prompt use?"
        answer = await context.elicit(question, form(context="string"), "user_context")
        return f"Use this context: {answer['content']['context']}"


class Everything(Asking, ToolEnvironment[State]):
    """Every kind of tool, resource and prompt once."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    BLOCKING = False

    def __init__(self) -> None:
        self._state = State(episode_id=str(uuid4()))

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        self._state = State(episode_id=episode_id or str(uuid4()))
        return Observation()

    @property
    def state(self) -> State:
        return self._state

    def list_tools(self) -> Sequence[ToolSpec]:
        """The declared ones; the schema of one of them no signature has."""
        return [
            spec.model_copy(update={"input_schema": SCHEMA_2020_12})
            if spec.name == "json_schema_2020_12_tool"
            else spec
            for spec in super().list_tools()
        ]

    @tool
    def test_simple_text(self) -> str:
        """Answer with text."""
        return "This is a simple text response for testing."

    @tool
    def test_image_content(self) -> Image:
        """Answer with a picture."""
        return Image(PNG)

    @tool
    def test_audio_content(self) -> Audio:
        """Answer with a sound."""
        return Audio(WAV)

    @tool
    def test_embedded_resource(self) -> Embedded:
        """Answer with a document."""
        return Embedded("test://embedded-resource", "This is an embedded resource content.", "text/plain")

    @tool
    def test_multiple_content_types(self) -> list[Content]:
        """Answer with text, a picture and a document."""
        data = json.dumps({"test": "data", "value": 123})
        return [
            Text("Multiple content types test:"),
            Image(PNG),
            Embedded("test://mixed-content-resource", data, "application/json"),
        ]

    @tool
    def test_error_handling(self) -> str:
        """Fail."""
        raise ToolFailedError("This tool intentionally returns an error for testing")

    @tool
    async def test_tool_with_logging(self, context: ToolContext) -> str:
        """Tell three things before answering."""
        for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            context.log("info", message)
            await asyncio.sleep(PAUSE_S)
        return "told three things"

    @tool
    async def test_logging_tool(self, context: ToolContext) -> str:
        """Tell one thing before answering."""
        context.log("info", "for those who have asked to be told")
        return "told one thing"

    @tool
    async def test_tool_with_progress(self, context: ToolContext) -> str:
        """Tell how far it is before answering."""
        for done in (0, 50, 100):
            context.progress(done, 100, f"{done} of 100")
            await asyncio.sleep(PAUSE_S)
        return "told three times"

    @tool
    async def test_sampling(self, prompt: str, context: ToolContext) -> str:
        """Ask the caller's language model."""
        answer = await context.sample(prompt, 100)
        return f"LLM response: {answer['content']['text']}"

    @tool
    async def test_elicitation(self, message: str, context: ToolContext) -> str:
        """Ask the caller's user."""
        return _told("User response", await context.elicit(message, PERSON))

    @tool
    async def test_elicitation_sep1034_defaults(self, context: ToolContext) -> str:
        """Ask with a form whose fields have defaults."""
        return _told("Elicitation completed", await context.elicit("Who are you?", DEFAULTS))

    @tool
    async def test_elicitation_sep1330_enums(self, context: ToolContext) -> str:
        """Ask with a form of choices."""
        return _told("Elicitation completed", await context.elicit("Choose.", CHOICES))

    @tool
    async def test_streaming_elicitation(self, context: ToolContext) -> str:
        """Ask the caller's user, for those who look at the stream."""
        return _told("User response", await context.elicit("What is your name?", NAME))

    @tool
    async def test_missing_capability(self, context: ToolContext) -> str:
        """Ask for what a caller may not have declared."""
        return str(await context.sample("Say hello", 10))

    @tool
    async def test_reconnection(self, context: ToolContext) -> str:
        """Take a moment, in which a caller may come back to the stream."""
        context.log("info", "one moment")  # a reply that nothing comes before is no stream
        await asyncio.sleep(PAUSE_S)
        return "Reconnection test completed"

    @tool
    def test_x_mcp_header(
        self, region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})] = "nowhere"
    ) -> str:
        """Take an argument that is told in a header too.

        Args:
            region: Where.
        """
        return f"region={region}"

    @tool
    def json_schema_2020_12_tool(self) -> str:
        """Be looked at for the schema of its arguments."""
        return "looked at"

    @tool
    def test_trigger_tool_change(self, context: ToolContext) -> str:
        """Tell that the list of tools is another one."""
        context.tools_changed()
        return "told"

    @tool
    def test_trigger_prompt_change(self, context: ToolContext) -> str:
        """Tell that the list of prompts is another one."""
        context.prompts_changed()
        return "told"

    @resource("test://static-text")
    def static_text(self) -> str:
        """A text."""
        return "This is the content of the static text resource."

    @resource("test://static-binary", mime_type="image/png")
    def static_binary(self) -> bytes:
        """A picture."""
        return PNG

    @resource("test://watched-resource")
    def watched(self) -> str:
        """A text that can be subscribed to."""
        return "Watched resource content"

    @resource("test://template/{id}/data", mime_type="application/json")
    def of_template(self, id: str) -> dict[str, Any]:  # noqa: A002 - the suites name it
        """One of many documents."""
        return {"id": id, "templateTest": True, "data": f"Data for ID: {id}"}

    @prompt
    def test_simple_prompt(self) -> str:
        """A prompt without arguments."""
        return "This is a simple prompt for testing."

    @prompt
    def test_prompt_with_arguments(self, arg1: str, arg2: str) -> str:
        """A prompt with arguments."""
        return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"

    @prompt
    def test_prompt_with_embedded_resource(self, resourceUri: str) -> list[PromptMessage]:  # noqa: N803 - as they name it
        """A prompt with a document."""
        return [
            PromptMessage(Embedded(resourceUri, "Embedded resource content for testing.", "text/plain")),
            PromptMessage("Please process the embedded resource above."),
        ]

    @prompt
    def test_prompt_with_image(self) -> list[PromptMessage]:
        """A prompt with a picture."""
        return [PromptMessage(Image(PNG)), PromptMessage("Please analyze the image above.")]

    @completion(prompt="test_prompt_with_arguments", argument="arg1")
    def complete_arg1(self, typed: str) -> list[str]:
        """Return what begins with what has been typed."""
        return [word for word in ("paris", "park", "party", "testing") if word.startswith(typed)]


def _told(what: str, answer: Mapping[str, Any]) -> str:
    return f"{what}: action={answer['action']}, content={json.dumps(answer.get('content', {}))}"


app = create_app(
    Everything, ToolAction, Observation, env_name="everything", max_concurrent_envs=256, state_cls=State
)
