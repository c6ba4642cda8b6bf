"""Runs a seccomp filter as the kernel's interpreter of classic BPF does, on a call of any architecture."""

import functools
import struct
from dataclasses import dataclass

MOST_INSTRUCTIONS = 4096


@dataclass(frozen=True)
class Ran:
    verdict: int
    loads: frozenset[int]  # the offsets in struct seccomp_data that were looked at


@functools.lru_cache(maxsize=16)
def instructions(program: bytes) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("=HBBI", program))


def run(program: bytes, audit: int, number: int, *arguments: int) -> Ran:
    padded = [*arguments, *([0] * (6 - len(arguments)))]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, audit, 0, *(value % (1 << 64) for value in padded))
    code = instructions(program)
    assert 0 < len(code) <= MOST_INSTRUCTIONS
    accumulator, at, loads = 0, 0, set()
    while True:
        op, true, false, operand = code[at]
        at += 1
        if op == 0x20:  # ld [k]
            assert operand % 4 == 0
            assert operand < len(data)
            loads.add(operand)
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif op == 0x54:  # and #k
            accumulator &= operand
        elif op == 0x05:  # ja k
            at += operand
        elif op in (0x15, 0x35, 0x45):  # jeq, jge, jset
            holds = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[op]
            at += true if holds else false
        elif op == 0x06:  # ret #k
            return Ran(operand, frozenset(loads))
        else:
            raise AssertionError(f"an instruction that the kernel refuses: {op:#x}")
        assert at < len(code), "ran off the end"
