"""What the image asks its own server: whether it is healthy, with a token where the server wants one."""

import asyncio
import os
import sys
from pathlib import Path

import counter
import pytest
from serving import serving

from servers import create_app
from servers.security import Guard
from servers.settings import ServerSettings

PROGRAM = Path(__file__).parents[2] / "dockerfiles" / "base" / "healthcheck.py"
TOKEN = "correct-horse-battery-staple"
WAIT_S = 20.0


async def checked(address: str, **variables: str) -> tuple[int | None, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWALK_TOKEN")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-IS",
        str(PROGRAM),
        env={**known, "PORT": address.rpartition(":")[2], **variables},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    return process.returncode, said.decode()


@pytest.mark.parametrize("given", ["variable", "several", "file", "none"])
async def test_a_server_with_a_token_is_healthy_to_who_knows_it(tmp_path: Path, given: str) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text(f"# of the team\n\n{TOKEN}\n")
    variables = {
        "variable": {"ROPEWALK_TOKENS": TOKEN},
        "several": {"ROPEWALK_TOKENS": f"{TOKEN},another-token-of-good-length"},
        "file": {"ROPEWALK_TOKEN_FILE": str(file)},
        "none": {},
    }[given]
    app = create_app(counter.Counter, counter.Add, counter.Count, max_concurrent_envs=4)
    guarded = Guard(app, ServerSettings(tokens=(TOKEN,)))
    async with serving(guarded) as address:  # type: ignore[arg-type]
        status, said = await checked(address, **variables)
    if given == "none":
        assert status == 1
        assert "expected a healthy server on port" in said
        assert "401" in said
    else:
        assert (status, said) == (0, "")


async def test_a_server_without_one_is_asked_as_it_is() -> None:
    async with serving(
        create_app(counter.Counter, counter.Add, counter.Count, max_concurrent_envs=4)
    ) as address:
        assert await checked(address) == (0, "")
    status, said = await checked(address)
    assert status == 1
    assert "ConnectionRefusedError" in said


async def test_tokens_that_cannot_be_read_are_told() -> None:
    status, said = await checked("127.0.0.1:9", ROPEWALK_TOKEN_FILE="/nonexistent/tokens")
    assert status == 1
    assert "/nonexistent/tokens" in said
