"""The scripted solver: runs its function on the example, then submits it."""

from envs.code_interpreter_env.models import CodeInterpreterObservation
from examples.grpo_code.family import example, solution
from rl_bridge.data.traces import Call


async def solve(observation: CodeInterpreterObservation, call: Call) -> None:
    """Play a task to its end; of the observation only the prompt is used.

    Raises:
        ValueError: The task is not of the family.
    """
    assert observation.prompt is not None
    code = solution(observation.prompt)
    await call("run_python", {"code": f"{code}\nprint({example(observation.prompt)})"})
    await call("submit", {})
