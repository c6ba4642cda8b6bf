"""What a test needs and the machine lacks: a skip that says so, and in CI, which has all of it, a failure."""

import os
from typing import NoReturn

import pytest


def missing(message: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
