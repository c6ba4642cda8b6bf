"""The scripted solver: tries its function on the example, and hands it in."""

from envs.code_interpreter_env.models import CodeInterpreterObservation
from examples.grpo_code.family import example, solution
from rl_bridge.data.traces import Call


async def solve(observation: CodeInterpreterObservation, call: Call) -> None:
    """Play a task to its end; reads the prompt, and nothing else of the observation.

    Raises:
        ValueError: It is no task of the family.
    """
    assert observation.prompt is not None
    code = solution(observation.prompt)
    await call("run_python", {"code": f"{code}\nprint({example(observation.prompt)})"})
    await call("submit", {})
