"""The same episodes, played by an agent: a loop over a client of OpenAI's, which knows nothing of training.

ropewalk train --config examples/grpo_tools/config.yaml model.path=runs/sft-tools/policy \
    rollout.agent.function=examples.grpo_tools.agent:play
"""

import json
from typing import Any

from rl_bridge.agents import AgentRun


async def play(run: AgentRun) -> None:
    """Answer the question with tools, until an answer calls none or the environment ends the episode."""
    client = run.openai()
    chat: list[Any] = list(run.messages)
    tools: list[Any] = list(run.functions)
    while True:
        reply = await client.chat.completions.create(model="policy", messages=chat, tools=tools)
        message = reply.choices[0].message
        if not message.tool_calls:
            return
        chat.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = await run.call(call.function.name, json.loads(call.function.arguments))
            chat.append({"role": "tool", "tool_call_id": call.id, "content": result})
