"""The models of tasks, hidden parts included. Only `public_view` of a task is ever served to clients.

A task is one line of JSON; the README in this folder shows each kind. Arguments and expected values are tagged JSON
(`openenv_core.sandbox.values`): `{"$tuple": [1, 2]}` is the tuple `(1, 2)`.
"""

import ast
import keyword
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    field_validator,
    model_validator,
)

from openenv_core.sandbox import Limits
from openenv_core.sandbox.values import decode, encode

from .compare import Compare, Exact, Unordered, parse_number

Scoring: TypeAlias = Literal["all_or_nothing", "fraction"]
Difficulty: TypeAlias = Literal["easy", "medium", "hard"]
Tagged: TypeAlias = Annotated[Any, BeforeValidator(decode), PlainSerializer(encode)]


def _check_identifier(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"expected a name of Python, got {name!r}")
    return name


Name: TypeAlias = Annotated[str, AfterValidator(_check_identifier)]


class StrictModel(BaseModel):
    """Base of all parts of a task: no type coercion, no unknown keys, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TaskLimits(StrictModel):
    """Resource limits of a submission.

    Attributes:
        timeout_s: seconds for each case, and for running the submission itself.
        total_s: seconds for the whole grading.
        memory_bytes: as in the sandbox's `Limits`.
        output_bytes: the maximum standard output of one case; a case that prints more fails.
    """

    timeout_s: float = Field(default=5.0, gt=0, le=600)
    total_s: float = Field(default=30.0, gt=0, le=3600)
    memory_bytes: int = Field(default=256 << 20, ge=16 << 20)
    output_bytes: int = Field(default=64 << 10, ge=1 << 10, le=4 << 20)

    def apply_to(self, limits: Limits) -> Limits:
        """Return the sandbox's limits, overridden by the task's."""
        return limits.changed(
            {
                "timeout_s": self.timeout_s,
                "memory_bytes": self.memory_bytes,
                "output_bytes": self.output_bytes,
            }
        )


# Cases in `public` may be shown to the policy, those in `hidden` never.


class FunctionCase(StrictModel):
    """A call and its expected return value.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        expected: the value that the comparison gets as the expected one.
    """

    args: list[Tagged] = []
    kwargs: dict[str, Tagged] = {}
    expected: Tagged


class StdioCase(StrictModel):
    """A run of the program with its standard input and expected standard output."""

    stdin: str = ""
    stdout: str


class BaseTask(StrictModel):
    """The fields of every task.

    Attributes:
        id: unique in its split.
        prompt: the task description.
        difficulty: easy, medium or hard.
        tags: topics of the task.
        starter: starter code.
        files: text files of the workspace by path; the policy can read them.
        limits: resource limits of a submission.
        scoring: "all_or_nothing": 1 if every case passes, else 0. "fraction": the share of cases that pass; of
            hidden ones if there are any, because the answers of public ones can be copied from the prompt.
        attempts: the number of submissions per episode.
        reference: a reference solution, for checking the task. It is never served and never put into a sandbox
            with a submission. The shipped tasks keep theirs outside the package.
    """

    id: str = Field(min_length=1, max_length=200)
    prompt: str = Field(min_length=1)
    difficulty: Difficulty = "medium"
    tags: list[str] = []
    starter: str = ""
    files: dict[str, str] = {}
    limits: TaskLimits = TaskLimits()
    scoring: Scoring = "all_or_nothing"
    attempts: int = Field(default=1, ge=1, le=1000)
    reference: str | None = None


class FunctionTask(BaseTask):
    """A function to write. It is called with each case's arguments; its results are compared outside its process."""

    kind: Literal["function"] = "function"
    entry: Name
    compare: Compare = Exact()
    public: list[FunctionCase] = []
    hidden: list[FunctionCase] = []

    @property
    def cases(self) -> list[FunctionCase]:
        """All of them, public ones first."""
        return [*self.public, *self.hidden]

    @model_validator(mode="after")
    def _check_expected(self) -> "FunctionTask":
        _require_cases(self.cases)
        for case in self.cases:
            if isinstance(self.compare, Unordered) and type(case.expected) not in (list, tuple):
                raise ValueError(f"expected a list as `expected` of 'unordered', got {case.expected}")
        return self


class StdioTask(BaseTask):
    """A program to write. Each case runs it in a fresh interpreter and reads its standard output.

    Attributes:
        match: "tokens" compares word by word, "exact" character by character except for the final newline.
        float_tol: with "tokens", the relative and absolute tolerance of decimal numbers; None requires equality.
        public: cases that may be shown to the policy.
        hidden: cases that may not.
    """

    kind: Literal["stdio"] = "stdio"
    match: Literal["tokens", "exact"] = "tokens"
    float_tol: float | None = Field(default=None, ge=0, lt=1)
    public: list[StdioCase] = []
    hidden: list[StdioCase] = []

    @property
    def cases(self) -> list[StdioCase]:
        """All of them, public ones first."""
        return [*self.public, *self.hidden]

    @model_validator(mode="after")
    def _check_cases(self) -> "StdioTask":
        _require_cases(self.cases)
        return self


class NumericTask(BaseTask):
    r"""A task whose answer is one number.

    Attributes:
        answer: the number, as a JSON number or in any form that `parse_number` accepts.
        answer_from: where to read the submission's answer: the last line that it prints ("stdout"), a variable, the
            return value of a function without arguments, or the submission itself, which is then text and not code
            ("text"). In a printed line or a text, the last `\boxed{...}` counts, if any.
        name: the name of the variable or function.
        rel_tol: tolerance relative to the answer.
        abs_tol: absolute tolerance; the larger of the two applies.
    """

    kind: Literal["numeric"] = "numeric"
    answer: str | int | float
    answer_from: Literal["stdout", "variable", "function", "text"] = "stdout"
    name: Name = "answer"
    rel_tol: float = Field(default=1e-6, ge=0, lt=1)
    abs_tol: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @field_validator("answer")
    @classmethod
    def _check_number(cls, answer: str | int | float) -> str | int | float:
        if isinstance(answer, bool) or parse_number(str(answer)) is None:
            raise ValueError(f"expected a number, got {answer!r}")
        return answer


class SuiteTask(BaseTask):
    """Test functions that import the submission as a module and share its process, which is a weaker guarantee.

    Attributes:
        module: the module name under which tests import the submission.
        public: source with functions `test_*` that may be shown to the policy.
        hidden: source with functions `test_*` that may not.
    """

    kind: Literal["suite"] = "suite"
    module: Name = "solution"
    public: str = ""
    hidden: str = ""

    @property
    def cases(self) -> list[tuple[str, str]]:
        """The source and the name of each test, public ones first."""
        return [(source, name) for source in (self.public, self.hidden) for name in find_tests(source)]

    @field_validator("public", "hidden")
    @classmethod
    def _check_compiles(cls, source: str) -> str:
        try:
            ast.parse(source)
        except SyntaxError as error:
            raise ValueError(f"expected test code that compiles, line {error.lineno}: {error.msg}") from None
        return source

    @model_validator(mode="after")
    def _check_tests(self) -> "SuiteTask":
        _require_cases(self.cases)
        return self


Task: TypeAlias = Annotated[FunctionTask | StdioTask | NumericTask | SuiteTask, Field(discriminator="kind")]
"""A task of any kind."""

_TASK: Final[TypeAdapter[Task]] = TypeAdapter(Task)

_HIDDEN_FIELDS: Final = frozenset({"hidden", "reference", "answer"})


def parse_task(line: str | bytes) -> Task:
    """Parse a task from a line of JSON.

    Raises:
        ValidationError: The line is not a valid task.
    """
    return _TASK.validate_json(line)


def public_view(task: Task) -> dict[str, Any]:
    """Return the part of a task that clients may see: no hidden cases, answer or reference.

    Files are listed by name only; their contents are in the interpreter's workspace.
    """
    view = task.model_dump(mode="json", exclude={*_HIDDEN_FIELDS, "files"})
    return view | {"files": sorted(task.files), "hidden_cases": _count_hidden(task)}


def find_tests(source: str) -> list[str]:
    """Return the names of the top-level functions `test_*` in test code, in order, without duplicates."""
    tree = ast.parse(source)
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return list(dict.fromkeys(node.name for node in functions if node.name.startswith("test_")))


def _count_hidden(task: Task) -> int:
    match task:
        case SuiteTask():
            return len(find_tests(task.hidden))
        case NumericTask():
            return 1
    return len(task.hidden)


def _require_cases(cases: Sequence[Any]) -> None:
    if not cases:
        raise ValueError("expected at least one case, got none")
