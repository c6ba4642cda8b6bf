from fractions import Fraction

import pytest

from envs.code_interpreter_env.grading.numbers import MAX_BOXES, boxed, close, parse_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        (" 42\n", 42),
        ("+7", 7),
        ("-7", -7),
        ("\N{MINUS SIGN}7", -7),
        ("- 7", -7),
        ("007", 7),
        ("1,234,567.5", Fraction("1234567.5")),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("-0.0", 0),
        ("6.02e23", Fraction("6.02e23")),
        ("1E-3", Fraction(1, 1000)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("1.5/3", Fraction(1, 2)),
        ("12.5%", Fraction(1, 8)),
        (r"25\%", Fraction(1, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{ 1 }{ 2 }", Fraction(-1, 2)),
        (r"\tfrac{-1}{2}", Fraction(-1, 2)),
        (r"1.5 \times 10^{-3}", Fraction("0.0015")),
        (r"2\cdot10^3", 2000),
        ("2*10^3", 2000),
        ("$3$", 3),
        ("$$3$$", 3),
        (r"\(3\)", 3),
        (r"\[ 3 \]", 3),
    ],
)
def test_a_number_is_read_exactly(text: str, number: Fraction | int) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "about 3",
        "3 apples",
        "3 4",
        "1 000",
        "1,23",
        "12,34,567",
        "1.2.3",
        "--3",
        "+-3",
        "3/0",
        "1/2/3",
        "1e",
        "1e99999",
        "e5",
        "0x10",
        "1_000",
        "nan",
        "inf",
        "True",
        "3+4",
        "2**3",
        "__import__('os')",
        "½",
        "٣",
        "%",
        "3%%",
        r"\frac{1}{0}",
        r"\frac{1}{2",
        r"\boxed{3}",
        "1" * 401,
        ".",
        "-",
        "$",
        "$$",
    ],
)
def test_what_is_not_one_number_is_none(text: str) -> None:
    assert parse_number(text) is None


def test_the_last_complete_box_counts() -> None:
    assert boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1} and \boxed{2") == "1"
    assert boxed("nothing") is None
    assert boxed(r"\boxed{" * 1000) is None


def test_openings_that_nobody_closes_are_looked_at_so_long_and_no_longer() -> None:
    assert boxed(r"\boxed{1} " + r"\boxed{{}" * (MAX_BOXES - 1)) == "1"
    # Each would have hundreds of characters gone through.
    assert boxed(r"\boxed{1} " + r"\boxed{{}" * 150_000) is None


def test_the_larger_tolerance_holds() -> None:
    assert close(Fraction(101), Fraction(100), 0.01, 0.0)
    assert not close(Fraction(102), Fraction(100), 0.01, 0.0)
    assert close(Fraction(102), Fraction(100), 0.01, 2.0)
    assert close(Fraction(0), Fraction(0), 0.0, 0.0)
    assert not close(Fraction(1, 10**9), Fraction(0), 0.5, 0.0)
