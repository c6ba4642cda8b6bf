"""Classic BPF for seccomp: argument rules, and a decision tree over call numbers.

Every piece of code here is self-contained: it ends in returns and jumps only within itself. So pieces are
put one after the other, and no label has to be resolved.
"""

import errno
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LOAD = 0x20
JUMP = 0x05
JUMP_EQUAL = 0x15
JUMP_AT_LEAST = 0x35
JUMP_ANY_BIT = 0x45
AND = 0x54
RETURN = 0x06

ALLOW = 0x7FFF_0000
KILL_PROCESS = 0x8000_0000
_ERRNO = 0x0005_0000

# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_ARGUMENTS_AT = 16

_LONGEST_JUMP = 255
_MOST_INSTRUCTIONS = 4096

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""
Code = list[Instruction]


def answer(code: int) -> int:
    """The verdict that makes a call fail with an errno."""
    return _ERRNO | code


# ------------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True)
class OneOf:
    """An int argument is one of these; the upper word is not looked at, as the kernel does not either."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFF_FFFF

    def code(self) -> Code:
        """Code that falls through where the test holds, and ends in a jump to be aimed where it does not."""
        masked = self.mask != 0xFFFF_FFFF
        head: Code = [(LOAD, 0, 0, _low(self.argument))]
        if masked:
            head.append((AND, 0, 0, self.mask))
        values = [value & 0xFFFF_FFFF for value in self.values]
        last = len(values) - 1
        return head + [
            (JUMP_EQUAL, last - index, _MISS if index == last else 0, value)
            for index, value in enumerate(values)
        ]


@dataclass(frozen=True)
class Only:
    """An argument has no bits but these; the upper word, where it is wide, has none at all."""

    argument: int
    bits: int
    wide: bool = False

    def code(self) -> Code:
        """See `OneOf.code`."""
        code: Code = [
            (LOAD, 0, 0, _low(self.argument)),
            (JUMP_ANY_BIT, _MISS, 0, ~self.bits & 0xFFFF_FFFF),
        ]
        if not self.wide:
            return code
        return [
            *code,
            (LOAD, 0, 0, _low(self.argument) + 4),
            (JUMP_ANY_BIT, _MISS, 0, 0xFFFF_FFFF),
        ]


@dataclass(frozen=True)
class AllOf:
    """An argument has all of these bits, which lie in its lower word."""

    argument: int
    bits: int

    def code(self) -> Code:
        """See `OneOf.code`."""
        return [
            (LOAD, 0, 0, _low(self.argument)),
            (AND, 0, 0, self.bits),
            (JUMP_EQUAL, 0, _MISS, self.bits),
        ]


Test = OneOf | Only | AllOf
_MISS = -1  # a jump to the next alternative, aimed once its distance is known


@dataclass(frozen=True)
class Rule:
    """What a call's arguments must be: every test of one of the alternatives, else the errno."""

    alternatives: tuple[tuple[Test, ...], ...]
    otherwise: int = errno.EPERM

    def code(self) -> Code:
        """Self-contained code that decides."""
        code: Code = []
        for tests in self.alternatives:
            block = [instruction for test in tests for instruction in test.code()]
            block.append((RETURN, 0, 0, ALLOW))
            end = len(block)
            code += [
                (
                    op,
                    end - at - 1 if true == _MISS else true,
                    end - at - 1 if false == _MISS else false,
                    value,
                )
                for at, (op, true, false, value) in enumerate(block)
            ]
        return [*code, (RETURN, 0, 0, answer(self.otherwise))]


def when(*tests: Test) -> Rule:
    """A rule with one alternative."""
    return Rule((tests,))


def _low(argument: int) -> int:
    # Both architectures are little-endian: the lower word comes first.
    return _ARGUMENTS_AT + 8 * argument


# ------------------------------------------------------------------------------------------------- tree

Verdict = int | Rule
"""What happens to a call: a return value of the filter, or a rule on its arguments."""


def decide(verdicts: Mapping[int, Verdict], otherwise: Callable[[int], int], last: int) -> Code:
    """A binary search over call numbers, which expects the number in the accumulator.

    A call that its number decides meets no other load: the kernel then answers it from a bitmap, without
    running the filter at all.

    Args:
        verdicts: The calls that have a verdict of their own.
        otherwise: The verdict on any other number.
        last: From the number after this one on, the verdict is `otherwise(last + 1)`.
    """
    starts: list[tuple[int, Verdict]] = []
    for number in range(last + 2):
        verdict = verdicts.get(number)
        if verdict is None:
            verdict = otherwise(number)
        if not starts or starts[-1][1] != verdict or isinstance(verdict, Rule):
            starts.append((number, verdict))
    return _tree(starts)


def _tree(ranges: Sequence[tuple[int, Verdict]]) -> Code:
    if len(ranges) == 1:
        verdict = ranges[0][1]
        return verdict.code() if isinstance(verdict, Rule) else [(RETURN, 0, 0, verdict)]
    middle = len(ranges) // 2
    low, high = _tree(ranges[:middle]), _tree(ranges[middle:])
    border = ranges[middle][0]
    if len(low) <= _LONGEST_JUMP:
        return [(JUMP_AT_LEAST, len(low), 0, border), *low, *high]
    return [(JUMP_AT_LEAST, 0, 1, border), (JUMP, 0, 0, len(low)), *low, *high]


def program(audit: int, foreign_from: int | None, tree: Code) -> bytes:
    """A whole filter: another architecture or calling convention kills the process, the tree does the rest."""
    code: Code = [
        (LOAD, 0, 0, _ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, audit),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, _NUMBER_AT),
    ]
    if foreign_from is not None:
        code += [(JUMP_AT_LEAST, 0, 1, foreign_from), (RETURN, 0, 0, KILL_PROCESS)]
    code += tree
    if len(code) > _MOST_INSTRUCTIONS:
        raise ValueError(f"expected at most {_MOST_INSTRUCTIONS} instructions, got {len(code)}")
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
