"""Tools and a prompt that ask their caller back: on the stateless wire that ends the call, which is then made again."""

from conformance_forms import form

from openenv_core.tools import (
    AskingUnavailable,
    DeclaredTools,
    Elicit,
    Request,
    Roots,
    Sample,
    ToolContext,
    prompt,
    tool,
)

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
            except AskingUnavailable:
                continue
        return "nobody to ask"

    @prompt
    async def test_input_required_result_prompt(self, context: ToolContext) -> str:
        """A prompt that asks back."""
        question = "What context should the prompt use?"
        answer = await context.elicit(question, form(context="string"), "user_context")
        return f"Use this context: {answer['content']['context']}"
