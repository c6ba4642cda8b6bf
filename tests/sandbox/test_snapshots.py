"""Sessions that keep the state of before a kill, and branch."""

import asyncio

import pytest

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import Limits, Sandbox, Session

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def value(session: Session, code: str) -> str | None:
    done = await session.execute(code)
    assert done.status == "ok", done
    return done.result


@pytest.mark.parametrize(
    ("code", "timeout_s", "status", "exit_code"),
    [
        ("x = 2\nimport os; os._exit(7)", None, "killed", 7),
        ("x = 2\nimport ctypes; ctypes.string_at(0)", None, "killed", 139),
        (
            "x = 2\nwhile True:\n  try:\n    import time; time.sleep(60)\n  except BaseException: pass",
            0.3,
            "timeout",
            124,
        ),
    ],
)
async def test_a_kill_takes_back_the_execution_and_nothing_else(
    sandbox: Sandbox, code: str, timeout_s: float | None, status: str, exit_code: int
) -> None:
    session = await sandbox.open(Limits(grace_s=0.1), snapshot=True)
    await session.execute("x = 1; y = [x]")
    done = await session.execute(code, timeout_s=timeout_s)
    assert (done.status, done.exit_code, done.state_lost) == (status, exit_code, False)
    assert await value(session, "x, y") == "(1, [1])"
    await session.close()


async def test_an_execution_that_ends_well_stays(sandbox: Sandbox) -> None:
    session = await sandbox.open(snapshot=True)
    await session.execute("import random; random.seed(1); a = random.random()")
    await session.execute("b = random.random()")
    assert await value(session, "random.seed(1); (a, b) == (random.random(), random.random())") == "True"
    await session.close()


async def test_branches_go_their_own_ways(sandbox: Sandbox) -> None:
    session = await sandbox.open(snapshot=True)
    await session.execute("x = [0]; open('f', 'w').write('base')")
    branches = await session.fork(3)
    for number, branch in enumerate(branches):
        await branch.execute(f"x.append({number}); open('f', 'a').write('{number}')")
    assert [await value(branch, "x, open('f').read()") for branch in branches] == [
        f"([0, {number}], 'base{number}')" for number in range(3)
    ]
    assert await value(session, "x, open('f').read()") == "([0], 'base')"
    await session.close()
    # The first one's end is not that of the others, which can branch on.
    (deeper,) = await branches[0].fork(1)
    await asyncio.gather(*(branch.close() for branch in branches))
    assert await value(deeper, "x, open('f').read()") == "([0, 0], 'base0')"
    await deeper.close()
    assert sandbox.sessions == 0


async def test_a_session_without_snapshots_does_not_branch(sandbox: Sandbox) -> None:
    session = await sandbox.open()
    with pytest.raises(ConfigurationError, match="snapshot=True"):
        await session.fork(2)
    await session.close()
