"""Skips a test whose requirements are not installed; in CI, which has all of them, it fails."""

import os
from importlib import import_module
from typing import Any, NoReturn

import pytest


def missing(message: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message, allow_module_level=True)


def require(package: str) -> Any:
    """Return a package that is imported; without it the test, or the whole module, is skipped."""
    try:
        return import_module(package)
    except ImportError:
        missing(f"needs {package}; pip install {package}")
