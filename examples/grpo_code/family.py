"""A family of programming tasks small enough for a tiny model: three steps over a list, then one result.

A number determines a task. A digest of a program's steps decides whether it is held out: held-out programs never occur
in training. The hidden cases of a task distinguish its program from constant functions and from itself without one of
its steps; otherwise a sixth of the tasks could be passed by simpler programs.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from envs.code_interpreter_env.grading import FunctionTask

ENTRY: Final = "f"
SHOWN_LENGTH: Final = 3
HIDDEN_CASES: Final = 6
"""Number of hidden cases, of which the first is the empty list."""
_HELD_OUT_SHARE: Final = 4
"""One in this many programs is held out."""
LIMITS: Final = MappingProxyType({"timeout_s": 3.0, "total_s": 25.0})
"""No program of the family takes a hundredth of a case's `timeout_s`. Defining the function and calling it for each
case, all just within that time, takes less than `total_s`: so a slow submission exceeds `timeout_s` and fails, and
`total_s` is only exceeded if the sandbox was slow. `total_s` has to be within `env.message_timeout_s`."""

Numbers = list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """An operation on a list; `@` stands for the list, and `#` for a number from 2 to 9.

    Attributes:
        wording: Phrases that describe the result.
        code: A Python expression that computes it.
        apply: An independent implementation, for the expected answers of the cases.
    """

    wording: tuple[str, ...]
    code: str
    apply: Callable[[Numbers, int], Any]


CHANGES: Final = (
    Step(
        ("the even numbers of @", "@ without odd numbers"),
        "[x for x in @ if x % 2 == 0]",
        lambda xs, _: [x for x in xs if not x & 1],
    ),
    Step(
        ("the odd numbers of @", "@ without even numbers"),
        "[x for x in @ if x % 2 == 1]",
        lambda xs, _: [x for x in xs if x & 1],
    ),
    Step(
        ("the numbers of @ above #", "what is greater than # in @"),
        "[x for x in @ if x > #]",
        lambda xs, k: [x for x in xs if x >= k + 1],
    ),
    Step(
        ("the numbers of @ below #", "what is less than # in @"),
        "[x for x in @ if x < #]",
        lambda xs, k: [x for x in xs if x <= k - 1],
    ),
    Step(
        ("the multiples of # in @", "what # divides in @"),
        "[x for x in @ if x % # == 0]",
        lambda xs, k: [x for x in xs if abs(x) % k == 0],
    ),
    Step(
        ("@ with # added to each", "@ with each greater by #"),
        "[x + # for x in @]",
        lambda xs, k: [k + x for x in xs],
    ),
    Step(
        ("@ with # taken from each", "@ with each smaller by #"),
        "[x - # for x in @]",
        lambda xs, k: [-(k - x) for x in xs],
    ),
    Step(
        ("# times each of @", "@ with each multiplied by #"),
        "[x * # for x in @]",
        lambda xs, k: [k * x for x in xs],
    ),
    Step(("the squares of @", "@ with each squared"), "[x * x for x in @]", lambda xs, _: [x**2 for x in xs]),
    Step(
        ("@ with each negated", "@ with all signs turned"),
        "[-x for x in @]",
        lambda xs, _: [0 - x for x in xs],
    ),
    Step(("@ in order", "@ with the smallest first"), "sorted(@)", lambda xs, _: sorted(xs)),
    Step(("@ backwards", "@ with the last first"), "@[::-1]", lambda xs, _: list(reversed(xs))),
    Step(
        ("the first # of @", "@ up to its place #"),
        "@[:#]",
        lambda xs, k: [x for at, x in enumerate(xs) if at < k],
    ),
    Step(
        ("@ without its first #", "@ after its place #"),
        "@[#:]",
        lambda xs, k: [x for at, x in enumerate(xs) if at >= k],
    ),
)
"""The operations that turn a list into a list."""

ENDS: Final = (
    Step(("all of @", "@ itself"), "@", lambda xs, _: xs),
    Step(("the sum of @", "what @ adds up to"), "sum(@)", lambda xs, _: sum(xs)),
    Step(("the length of @", "how many @ has"), "len(@)", lambda xs, _: len(xs)),
    Step(
        ("the largest of @, or 0", "the greatest of @, or 0"),
        "max(@, default=0)",
        lambda xs, _: sorted(xs)[-1] if xs else 0,
    ),
)
"""The operations that a program ends with."""

ARGUMENT: Final = "xs"
NAMES: Final = ("a", "b", "c")
"""Names of the lists that the steps return."""


@dataclass(frozen=True, slots=True)
class Program:
    """Steps with their numbers, and a last operation."""

    steps: tuple[tuple[Step, int], ...]
    end: Step

    def __call__(self, numbers: Sequence[int]) -> Any:
        """Return the result for a list."""
        xs = list(numbers)
        for step, k in self.steps:
            xs = step.apply(xs, k)
        return self.end.apply(xs, 0)

    @property
    def held_out(self) -> bool:
        """Whether the program never occurs in training."""
        digest = hashlib.blake2b(source_of(self).encode(), digest_size=8).digest()
        return digest[0] % _HELD_OUT_SHARE == 0


def source_of(program: Program) -> str:
    """Return the program as Python source."""
    lines = [
        f"    {name} = {_fill_slots(step.code, argument, k)}"
        for (step, k), name, argument in zip(program.steps, NAMES, (ARGUMENT, *NAMES), strict=False)
    ]
    end = program.end.code.replace("@", NAMES[len(program.steps) - 1])
    return "\n".join([f"def {ENTRY}({ARGUMENT}):", *lines, f"    return {end}"])


def _fill_slots(text: str, name: str, k: int) -> str:
    return text.replace("@", name).replace("#", str(k))


@dataclass(frozen=True, slots=True)
class ProgramDraw:
    """The program and cases of a number.

    Attributes:
        program: The program to write.
        hidden: The lists of the hidden cases.
        source: The random generator for further draws.
    """

    program: Program
    hidden: tuple[Numbers, ...]
    source: random.Random


def draw(number: int, *, held_out: bool) -> ProgramDraw:
    """Draw the program of a number, and lists that distinguish it from simpler ones.

    Args:
        number: Determines everything.
        held_out: Draw a held-out program.
    """
    source = random.Random(f"code {number}")
    while True:
        steps = tuple((source.choice(CHANGES), source.randint(2, 9)) for _ in NAMES)
        program = Program(steps, source.choice(ENDS))
        lengths = (0, *(source.randint(6, 14) for _ in range(HIDDEN_CASES - 1)))
        hidden = tuple([source.randint(-15, 15) for _ in range(length)] for length in lengths)
        if program.held_out == held_out and distinguish(program, hidden):
            return ProgramDraw(program, hidden, source)


def distinguish(program: Program, lists: Sequence[Numbers]) -> bool:
    """Return whether lists distinguish a program from a constant, and from itself without one of its steps."""
    answers = [program(numbers) for numbers in lists]
    shorter_programs = (
        Program(program.steps[:index] + program.steps[index + 1 :], program.end)
        for index in range(len(program.steps))
    )
    return any(answer != answers[0] for answer in answers) and all(
        [shorter(numbers) for numbers in lists] != answers for shorter in shorter_programs
    )


def make_task(number: int, *, held_out: bool) -> FunctionTask:
    """Make the task of a number.

    Args:
        number: Determines everything.
        held_out: Ask for a held-out program.
    """
    drawn = draw(number, held_out=held_out)
    program, source = drawn.program, drawn.source
    sentences = [
        f"Let {name} be {_fill_slots(source.choice(step.wording), argument, k)}."
        for (step, k), name, argument in zip(program.steps, NAMES, (ARGUMENT, *NAMES), strict=False)
    ]
    sentences.append(f"Return {source.choice(program.end.wording).replace('@', NAMES[-1])}.")
    example = [source.randint(-9, 9) for _ in range(SHOWN_LENGTH)]
    return FunctionTask.model_validate(
        {
            "id": f"code-{number}",
            "prompt": (
                f"Write {ENTRY}({ARGUMENT}) for a list of integers. {' '.join(sentences)} "
                f"Example: {ENTRY}({example}) is {program(example)}."
            ),
            "entry": ENTRY,
            "public": [{"args": [example], "expected": program(example)}],
            "hidden": [{"args": [xs], "expected": program(xs)} for xs in drawn.hidden],
            "limits": dict(LIMITS),
        }
    )


_EXAMPLE: Final = re.compile(rf" Example: ({ENTRY}\(.*\)) is .*\.$")
_SENTENCE: Final = re.compile(r"(?:Let ([abc]) be|Return) (.+)\.")
_PATTERNS: Final = tuple(
    (
        re.compile(re.escape(wording).replace("@", r"(?P<list>xs|[abc])").replace(r"\#", r"(?P<k>\d)")),
        step.code,
    )
    for step in (*CHANGES, *ENDS)
    for wording in step.wording
)


def solution(prompt: str) -> str:
    """Return the scripted solver's program, derived from the prompt alone.

    Raises:
        ValueError: The prompt is not of the family.
    """
    _, _, request = _EXAMPLE.sub("", prompt).partition(". ")
    if not request:
        raise ValueError(f"expected a prompt of the family, got {prompt!r:.200}")
    lines = [_parse_sentence(sentence) for sentence in re.findall(r"[^.]+\.", request)]
    return "\n".join([f"def {ENTRY}({ARGUMENT}):", *lines])


def example(prompt: str) -> str:
    """Return the example call in a prompt.

    Raises:
        ValueError: The prompt has no example.
    """
    if (match := _EXAMPLE.search(prompt)) is None:
        raise ValueError(f"expected a prompt with an example, got {prompt!r:.200}")
    return match[1]


def _parse_sentence(sentence: str) -> str:
    match = _SENTENCE.fullmatch(sentence.strip())
    name, wording = match.groups() if match else (None, sentence)
    for pattern, code in _PATTERNS:
        if slots := pattern.fullmatch(wording):
            expression = code.replace("@", slots["list"]).replace("#", slots.groupdict().get("k", "#"))
            return f"    return {expression}" if name is None else f"    {name} = {expression}"
    raise ValueError(f"expected a sentence of the family, got {sentence!r}")
