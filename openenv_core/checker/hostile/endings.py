"""Whether a server bears sessions, and itself, to be cut off in the middle."""

import asyncio
from contextlib import ExitStack, suppress
from typing import Any, Final

from openenv_core.checker.check import CheckFailed, Level, check
from openenv_core.checker.playing.compared import answered, play_there, some_actions
from openenv_core.checker.playing.parting import parting
from openenv_core.checker.semantic.seeds import repeats
from openenv_core.checker.subject import REFUSING, Client, Subject
from openenv_core.errors import ClientError, ConnectionLost, ServerError
from openenv_core.targets import TargetKind

CUT_OFF: Final = 32
"""Sessions that are cut off in the middle of a step."""

SLOTS: Final = 4
"""The cap of a server that is started for it, where there can be so many."""

KILLED_ID: Final = "ropewalk-killed"


@check(Level.HOSTILE)
def check_disconnect_gives_the_slot_back(subject: Subject) -> None:
    """A session that is cut off in the middle of a step gives its slot back, and the server goes on."""
    slots = min(SLOTS, subject.cap or 1)
    with ExitStack() as stack:
        if subject.kind is TargetKind.URL:
            url = subject.url
        else:
            options: dict[str, Any] = {} if subject.kind is TargetKind.IMAGE else {"max_sessions": slots}
            url = stack.enter_context(subject.server(**options)).url
        try:
            for wave in range(CUT_OFF // slots):
                asyncio.run(_cut_off(subject, url, wave, slots))
            clients = [stack.enter_context(subject.client(url)) for _ in range(slots)]
            for number, client in enumerate(clients):
                play_there(
                    subject,
                    client,
                    number,
                    some_actions(subject, number),
                    episode_id=f"ropewalk-slot-{number}",
                )
        except (ClientError, CheckFailed) as error:
            if isinstance(error, CheckFailed) and error.cause == REFUSING:
                raise
            raise CheckFailed(
                f"expected {slots} sessions to play after {CUT_OFF} that were cut off in the middle of a step, "
                f"got {error}",
                change="give back in close() whatever __init__, reset or step took, and let close() return at "
                "once, whether or not the episode was over",
            ) from error


async def _cut_off(subject: Subject, url: str, wave: int, sessions: int) -> None:
    """Open sessions, let each begin a step, and break them off."""
    await asyncio.gather(*(_one(subject, url, wave * sessions + number) for number in range(sessions)))


async def _one(subject: Subject, url: str, number: int) -> None:
    client: Any = await _opened(subject, url)
    try:
        await client.reset(**{**subject.reset_options, "seed": number})
        step = asyncio.create_task(client.step(next(subject.actions(number))))
        await asyncio.sleep(0)  # the frame is on its way
        step.cancel()
        with suppress(asyncio.CancelledError, ClientError):
            await step
        if number % 2:
            client._carrier.abort()  # no goodbye, as when a machine goes
    finally:
        await client.close()


async def _opened(subject: Subject, url: str) -> Any:
    """Open a session, waiting for the slot of one that is about to end."""
    deadline = asyncio.get_running_loop().time() + subject.limits.step_timeout_s + 5
    while True:
        client = await subject.client(url)
        try:
            await client.state()
        except ServerError:
            await client.close()
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return client


@check(Level.HOSTILE)
def check_kill_and_restart(subject: Subject) -> None:
    """A server that is killed serves again, and begins an episode as if there had been none before."""
    actions = some_actions(subject, 0)
    seed = subject.limits.seed
    # What hashes of text differ by is another check's to tell.
    with subject.server(env_vars={"PYTHONHASHSEED": "0"}) as server:
        with subject.client(server.url) as client:
            first = play_there(subject, client, seed, actions, episode_id=f"{KILLED_ID}-0")
        with subject.client(server.url) as client:
            play_there(subject, client, seed, actions[:1], episode_id=KILLED_ID)  # left in the middle
            server.kill()
            _need_lost(client)
            server.restart()
        with subject.client(server.url) as client:
            again = play_there(subject, client, seed, actions, episode_id=KILLED_ID)
            with answered("the state to be read"):
                client.state()
    found = parting(first, again) if repeats(subject) else None
    if found is not None:
        raise CheckFailed(
            f"expected an episode after a kill to begin anew, got what the killed server left: {found}",
            change="keep nothing of an episode in files or elsewhere outside of the process; clear at the start "
            "what an earlier one may have left",
        )


def _need_lost(client: Client) -> None:
    """Notice that the killed server is gone."""
    try:
        client.state()
    except ConnectionLost:
        return
    except ClientError as error:
        raise CheckFailed(
            f"expected the connection to a killed server to be lost, got {type(error).__name__}: {error}",
            change="let the server's own process hold its connections",
        ) from error
    raise CheckFailed(
        "expected the connection to a killed server to be lost, got an answer",
        change="serve from the process that is started, or from its children",
    )
