"""A family of programming tasks small enough for a tiny model: a list goes through three steps, one value comes out.

A number decides a task. Programs are divided in two by a digest of their steps: those of held-out tasks are never asked
for in training. The hidden cases of a task tell its program from those that always give the same, and from those that
leave a step out: otherwise a sixth of the tasks could be passed without doing what they ask for.
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
"""The first of them is the empty list."""
_HELD_OUT_SHARE: Final = 4
"""One program in so many is held out."""
LIMITS: Final = MappingProxyType({"timeout_s": 3.0, "total_s": 25.0})
"""No program of the family takes a hundredth of a case's time. To define the function and to call it for each case, all
of them just within it, is within the whole: what runs out of that was kept waiting, and what dawdles has failed. The
whole has to be within `env.message_timeout_s`."""

Numbers = list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """Something that can be done with a list; `@` stands for the list, and `#` for a number from 2 to 9.

    Attributes:
        wording: Ways to put what it gives.
        code: What gives it, as an expression.
        apply: The same without Python's source, for the answers that submissions are held against.
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
"""What turns a list into a list."""

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
"""What a program ends with."""

ARGUMENT: Final = "xs"
NAMES: Final = ("a", "b", "c")
"""What the lists are called that come of it, step by step."""


@dataclass(frozen=True, slots=True)
class Program:
    """Steps with their numbers, and an end."""

    steps: tuple[tuple[Step, int], ...]
    end: Step

    def __call__(self, numbers: Sequence[int]) -> Any:
        """What it gives for a list."""
        xs = list(numbers)
        for step, k in self.steps:
            xs = step.apply(xs, k)
        return self.end.apply(xs, 0)

    @property
    def held_out(self) -> bool:
        """Whether training never asks for it."""
        digest = hashlib.blake2b(source_of(self).encode(), digest_size=8).digest()
        return digest[0] % _HELD_OUT_SHARE == 0


def source_of(program: Program) -> str:
    """The program as Python."""
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
    """What a number decides.

    Attributes:
        program: What is asked for.
        hidden: The lists that it is judged by.
        source: Where further chance comes from.
    """

    program: Program
    hidden: tuple[Numbers, ...]
    source: random.Random


def draw(number: int, *, held_out: bool) -> ProgramDraw:
    """The program of a number, and lists that tell it from lesser ones.

    Args:
        number: Decides everything.
        held_out: Draw a program that training never asks for.
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
    """Whether lists distinguish a program from a constant, and from itself without one of its steps."""
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
        number: Decides everything.
        held_out: Ask for a program that training never asks for.
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
    """What the scripted solver hands in: it reads the prompt, and nothing else.

    Raises:
        ValueError: It is no prompt of the family.
    """
    _, _, request = _EXAMPLE.sub("", prompt).partition(". ")
    if not request:
        raise ValueError(f"expected a prompt of the family, got {prompt!r:.200}")
    lines = [_parse_sentence(sentence) for sentence in re.findall(r"[^.]+\.", request)]
    return "\n".join([f"def {ENTRY}({ARGUMENT}):", *lines])


def example(prompt: str) -> str:
    """The call that a prompt shows.

    Raises:
        ValueError: It shows none.
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
