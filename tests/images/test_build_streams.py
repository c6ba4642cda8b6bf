"""What builders say while they work, and what is shown of it. The words are an engine's own, recorded."""

import io
from pathlib import Path

import pytest

from openenv_core.cli.image_progress import show_events
from openenv_core.images import builders as commandline
from openenv_core.images import builders as sdk
from openenv_core.images.errors import BuildError, remedy_for
from openenv_core.images.events import (
    BuildRequest,
    Cached,
    Event,
    Layer,
    Note,
    Step,
    StepOutput,
)

REQUEST = BuildRequest(context=Path("/somewhere"), dockerfile="Dockerfile", tags=("a:1",))

BUILDKIT = """\
#1 [internal] load build definition from Dockerfile
#1 transferring dockerfile: 136B done
#1 DONE 0.0s

#4 [builder 1/3] FROM docker.io/library/python:3.11-slim
#4 CACHED

#5 [builder 2/3] RUN --mount=type=cache,target=/c pip install x
#5 sha256:0123
#5 0.412 Collecting x
#6 [stage-1 2/2] COPY a b
#5 1.201 ERROR: No matching distribution found for x
#5 ERROR: executor failed running [/bin/sh -c pip install x]: exit code: 1
#6 CANCELED
------
 > [builder 2/3] RUN --mount=type=cache,target=/c pip install x:
------
executor failed running [/bin/sh -c pip install x]: exit code: 1
"""


def test_buildkit_s_lines_become_steps_and_its_failure_an_error() -> None:
    told: list[Event] = []
    progress = commandline._CommandProgress(told.append)
    for line in BUILDKIT.splitlines():
        progress.take(line)
    assert told == [
        Step(1, 3, "builder: FROM docker.io/library/python:3.11-slim"),
        Cached(),
        Step(2, 3, "builder: RUN --mount=type=cache,target=/c pip install x"),
        StepOutput("Collecting x"),
        Step(2, 2, "stage-1: COPY a b"),
        StepOutput("ERROR: No matching distribution found for x"),
    ]
    error = progress.failure(REQUEST, 1)
    assert error.step == "builder: RUN --mount=type=cache,target=/c pip install x"
    assert error.output == ("Collecting x", "ERROR: No matching distribution found for x")
    assert "a requirement of pyproject.toml cannot be had" in str(error)


def test_a_build_that_never_began_shows_all_that_was_said() -> None:
    progress = commandline._CommandProgress(lambda _: None)
    for line in (
        "#1 [internal] load",
        "failed to solve: dockerfile parse error line 4: unknown instruction: ECHO",
    ):
        progress.take(line)
    error = progress.failure(REQUEST, 1)
    assert str(error).startswith("expected the build of /somewhere to succeed, got: failed to solve")
    assert "this engine's builder does not know what the Dockerfile says" in str(error)


def test_the_older_builder_s_messages_become_steps_and_its_error_an_error() -> None:
    told: list[Event] = []
    progress = sdk._Progress(told.append)
    for said in (
        {"stream": "Step 1/2 : FROM a"},
        {"stream": "\n"},
        {"status": "Downloading", "id": "abc", "progressDetail": {"current": 5, "total": 10}},
        {"stream": " ---> 0123456789ab\n"},
        {"stream": "Step 2/2 : RUN x &&     y"},
        {"stream": " ---> Using cache\n"},
        {"stream": "\x1b[91mone\n\x1b[0m10%\r20%\rtwo\n"},
    ):
        progress.take(said)
    assert told == [
        Step(1, 2, "FROM a"),
        Layer("abc", "Downloading", 5, 10),
        Step(2, 2, "RUN x &&     y"),
        Cached(),
        StepOutput("one"),
        StepOutput("two"),
    ]
    with pytest.raises(BuildError, match="--- the step's last output ---\none\ntwo\n---") as caught:
        progress.take({"errorDetail": {"code": 3}, "error": "The command returned a non-zero code: 3"})
    assert caught.value.step == "RUN x &&     y"


def test_a_failure_says_what_to_do_and_shows_the_last_lines_alone() -> None:
    for said, remedy in (
        ("pull access denied for ropewalk-base, repository does not exist", "ropewalk build base"),
        ("error: command 'gcc' failed: No such file or directory", "no compiler"),
        ("COPY failed: file not found in build context: stat x: no such file or directory", ".dockerignore"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "the network's proxy"),
        ("OSError: [Errno 28] No space left on device", "docker system prune"),
        (
            "Directory '/app/env' is not installable. Neither 'setup.py' nor 'pyproject.toml' found.",
            "has one",
        ),
        ("something nobody has seen", "correct that step"),
    ):
        assert remedy in remedy_for(said)
    error = BuildError("no", output=[f"line {number}" for number in range(100)])
    assert error.output == tuple(f"line {number}" for number in range(70, 100))


def events() -> list[Event]:
    return [
        Note("first this"),
        Step(1, 2, "FROM a"),
        Layer("abc", "Downloading", 5, 10_000_000),
        Layer("abc", "Downloading", 6, 10_000_000),
        Layer("abc", "Pull complete"),
        Step(2, 2, "RUN x \\\n  y"),
        StepOutput("[red]a line[/red]"),
    ]


def test_elsewhere_than_on_a_terminal_lines_stay() -> None:
    for verbose in (False, True):
        stream = io.StringIO()
        with show_events(verbose=verbose, stream=stream) as tell:
            for event in events():
                tell(event)
        assert stream.getvalue().splitlines() == [
            "note: first this",
            "[1/2] FROM a",
            "  abc: Downloading 5 B/10.0 MB",
            "  abc: Pull complete",
            "[2/2] RUN x \\ y",
            *(["  [red]a line[/red]"] if verbose else []),
        ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with show_events(stream=stream) as tell:
        tell(Step(1, 2, "FROM a"))
        tell(Cached())
    assert "\x1b[" in stream.getvalue()  # the line that moves
    assert "[1/2] FROM a  cached" in stream.getvalue()
