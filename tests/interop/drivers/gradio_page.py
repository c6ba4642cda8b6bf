"""A counter with a page of Gradio's, as released environments make theirs."""

from typing import Any

import gradio
from counter import Add, Count, Counter

from servers import create_app


def builder(
    web_manager: Any,
    action_fields: list[dict[str, Any]],
    metadata: Any,
    is_chat_env: bool,
    title: str,
    quick_start_md: str,
) -> gradio.Blocks:
    async def on_reset() -> str:
        told = await web_manager.reset_environment({"seed": 3})
        return f"{title}: {told['observation']['total']}"

    async def on_step() -> str:
        told = await web_manager.step_environment({action_fields[0]["name"]: 2})
        logs = web_manager.episode_state.action_logs
        return f"{told['observation']['total']} {web_manager.get_state()['total']} {len(logs)}"

    with gradio.Blocks() as blocks:
        shown = gradio.Textbox(label=metadata.name)
        gradio.Button("reset").click(on_reset, outputs=shown, api_name="reset")
        gradio.Button("step").click(on_step, outputs=shown, api_name="step")
    return blocks


app = create_app(Counter, Add, Count, env_name="counter", max_concurrent_envs=8, gradio_builder=builder)
