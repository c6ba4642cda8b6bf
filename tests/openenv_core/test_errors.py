import inspect
import re

import pytest

from openenv_core import OpenEnvError, RequestTimeout, ServerError, ValidationFailed, errors
from openenv_core.protocol.replies import server_error


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    classes = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, OpenEnvError)}
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^(    [│├└─ ]*)([A-Z]\w+)", line)
        if match:
            drawn[match[2]] = len(match[1])
    assert drawn.keys() == classes.keys()
    path: list[str] = []
    for name, indent in drawn.items():
        path = [p for p in path if drawn[p] < indent]
        assert not path or path[-1] in [base.__name__ for base in classes[name].__bases__]
        path.append(name)


@pytest.mark.parametrize(
    "errors_field", [None, "text", 3, [1], [{"loc": ["a", 0], "msg": "m"}], [{"loc": 5}], [{"loc": None}]]
)
def test_whatever_a_server_puts_into_errors(errors_field: object) -> None:
    error = server_error({"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors_field})
    assert isinstance(error, ValidationFailed)
    assert "Invalid message" in str(error)


def test_a_code_from_the_future() -> None:
    error = server_error({"code": "NEW"})
    assert type(error) is ServerError
    assert error.code == "NEW"
    assert issubclass(RequestTimeout, TimeoutError)
