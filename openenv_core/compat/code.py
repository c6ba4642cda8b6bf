"""What running code gives, as the released package has it."""

from pydantic import BaseModel, ConfigDict


class CodeExecResult(BaseModel):
    """What running code gave.

    Attributes:
        stdout: What was printed; then, on a line of its own, the `repr` of a last expression's value.
        stderr: What was printed there, the traceback, and why code did not end by itself.
        exit_code: 0 where it came to its end.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    stdout: str
    stderr: str
    exit_code: int
