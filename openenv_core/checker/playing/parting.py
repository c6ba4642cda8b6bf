"""Where two episodes that are to be the same part."""

from collections.abc import Sequence
from typing import Any, TypeAlias

Result: TypeAlias = dict[str, Any]
"""What came of a reset or a step: {observation, reward, done}, or {error}."""


def parting(one: Sequence[Result], other: Sequence[Result]) -> str | None:
    """Return where two episodes part; None where they are the same.

    Metadata is left out: it is there for logs, and may tell the time.
    """
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if (found := _parting(_compared(left), _compared(right), "")) is not None:
            place = "the reset" if number == 0 else f"step {number}"
            return f"at {place}, {found}"
    if len(one) != len(other):
        return f"one ends after {len(one) - 1} steps and the other after {len(other) - 1}"
    return None


def _compared(result: Result) -> Result:
    if "error" in result:
        return {"error": result["error"]}
    observation = result["observation"]
    if isinstance(observation, dict):
        observation = {name: value for name, value in observation.items() if name != "metadata"}
    return {"observation": observation, "reward": result["reward"], "done": result["done"]}


def _parting(left: Any, right: Any, path: str) -> str | None:
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        parts = ((f"{path}.{key}" if path else key, left[key], right[key]) for key in left)
        return next((found for place, a, b in parts if (found := _parting(a, b, place))), None)
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next((found for at, (a, b) in pairs if (found := _parting(a, b, f"{path}[{at}]"))), None)
    if type(left) is not type(right) or left != right:
        return f"{path or 'the result'} is {_short(left)} in one and {_short(right)} in the other"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
