"""Examples by dotted path. Imported by the tests."""

from collections.abc import Iterator

from rl_bridge.data.examples import Example

LISTED = [{"prompt": f"What is {number} + {number}?", "target": 2 * number} for number in range(5)]
NUMBER = 5


def generated() -> Iterator[Example]:
    for number in range(3):
        yield Example(id=f"made-{number}", prompt=({"role": "user", "content": "hm"},), target=number)


def nothing() -> list[Example]:
    return []
