"""Checks that seeds reproduce episodes, and that sessions and forks are isolated. They play over the wire."""

import inspect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any, Final, TypeAlias

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.playing import (
    LocalEnvironment,
    Result,
    accepted_options,
    continue_turns,
    draw_actions,
    expect_answer,
    find_difference,
    method_of,
    play,
    turns,
)
from openenv_core.checker.subject import SLOT_WAIT_S, Client, Subject
from openenv_core.errors import (
    CapacityError,
    ConfigurationError,
    ExecutionError,
    NotForkableError,
    ServerError,
)

_SEEDED: Final = (
    "draw all random values from self.rng, or, in a class that writes its own state, from a generator that reset makes "
    "from its seed: self._random = random.Random(seed)"
)

_SEEDS: Final = 5
"""Number of seeds to play."""

_DIFFERENT: Final = 8
"""Number of seeds among which at least two episodes have to differ."""

_HASH_SEEDS: Final = ("0", "1")
"""PYTHONHASHSEED of two servers, which hash text and order sets of it differently."""

_SESSION_STEPS: Final = 20

Job: TypeAlias = list[tuple[int, list[dict[str, Any]]]]


@check(CheckLevel.SEMANTIC)
def check_same_seed_same_episode(subject: Subject) -> None:
    """The same seed and actions give the same episode in two instances of one process.

    An environment that takes a seed promises this, unless its manifest says `deterministic: false`.
    """
    _require_seeds(subject)
    difference = _find_nondeterminism(subject)
    if difference is None:
        return
    if shared := _find_shared_attribute(subject):
        raise CheckError(
            f"expected the same episode twice, got two: {difference}; episodes change {shared}, which all instances "
            "share",
            change="create it for each instance and episode: on self, in reset, never on the class",
        )
    raise CheckError(f"expected the same episode twice, got two: {difference}", change=_SEEDED)


@check(CheckLevel.SEMANTIC)
def check_reset_forgets(subject: Subject) -> None:
    """A reset clears the previous episode: a used instance plays like a new one."""
    _require_repeats(subject)
    job = _make_job(subject, 3)
    fresh = [_play_fresh(subject, *episode) for episode in job]
    with subject.client() as reused:
        replayed = [play(reused, *episode) for episode in [*job, job[0]]]
        play(reused, job[1][0], job[1][1][:1])  # an aborted episode
        replayed.append(play(reused, *job[2]))
    for expected, played in zip([*fresh, fresh[0], fresh[2]], replayed, strict=True):
        if (difference := find_difference(expected, played)) is not None:
            raise CheckError(
                f"expected a used instance to play like a new one, got: {difference}",
                change="create all state of an episode in reset, including the random generator",
            )


@check(CheckLevel.SEMANTIC)
def check_same_seed_in_another_process(subject: Subject) -> None:
    """The same seed gives the same episode in a server's process, with another hash seed."""
    _require_repeats(subject)
    job = _make_job(subject)
    played = []
    with suppress(NotApplicableError):  # the code of an image is not here
        played.append([_play_here(subject, *episode) for episode in job])
    # In reverse order in the second process, so that state left in a module reaches other episodes.
    for hash_seed, order in zip(_HASH_SEEDS, (1, -1), strict=True):
        with subject.server(env_vars={"PYTHONHASHSEED": hash_seed}) as server:
            played.append([_play_fresh(subject, *episode, server.url) for episode in job[::order]][::order])
    for (seed, _), expected, *others in zip(job, *played, strict=True):
        for other in others:
            if (difference := find_difference(expected, other)) is not None:
                raise CheckError(
                    f"expected seed {seed} to give the same episode in a server's process, got: {difference}",
                    change="let nothing in an episode depend on hash() of text, on the order of a set, on id(), the "
                    "process, its thread, the time, or which episodes were played before; " + _SEEDED,
                )


@check(CheckLevel.SEMANTIC)
def check_different_seeds_differ(subject: Subject) -> None:
    """Different seeds give different episodes."""
    _require_seeds(subject)
    if not subject.manifest_or_defaults.validation.episodes.varied:
        raise NotApplicableError(
            "the manifest declares that all episodes are the same (validation.episodes.varied)"
        )
    _require_repeats(subject)
    start = subject.limits.seed
    for action_seed in range(2):
        actions = draw_actions(subject, action_seed)
        episodes = [_play_fresh(subject, seed, actions) for seed in range(start, start + _DIFFERENT)]
        if any(find_difference(episodes[0], other) is not None for other in episodes[1:]):
            return
    raise CheckError(
        f"expected different episodes for {_DIFFERENT} different seeds, got the same one {_DIFFERENT} times",
        change="use the seed passed to reset; if all episodes are meant to be the same, declare `varied: false` in "
        "validation.episodes of openenv.yaml",
    )


@check(CheckLevel.SEMANTIC)
def check_forks_go_their_own_way(subject: Subject) -> None:
    """A fork continues as the original would have, and neither changes the other.

    A snapshot is taken in the middle of an episode. A first fork plays other actions, then another episode. A second
    one, and the original after it, must continue like the same episode without forks.
    """
    same = repeats(subject)
    for number, (seed, actions) in enumerate(_make_job(subject, 3)):
        expected = _play_fresh(subject, seed, actions)
        half = (len(expected) - 1) // 2
        rest = actions[half : len(expected) - 1]
        with subject.client() as original:
            play(original, seed, actions[:half])
            other, fork = _fork(subject, original)
            with other, fork:
                _continue_episode(other, draw_actions(subject, number + 1))
                play(other, seed + 1, actions)
                continued = {"a fork": _continue_episode(fork, rest)}
            continued["the original"] = _continue_episode(original, rest)
        for which, played in continued.items():
            if same and (difference := find_difference(expected[half + 1 :], played)) is not None:
                raise CheckError(
                    f"expected {which} to continue after {half} steps like the episode with seed {seed} that was not "
                    f"forked, got: {difference}",
                    change="let snapshot return everything that determines the episode, including the generator, and "
                    "let restore copy it: a fork must not change what another one uses",
                )


def _fork(subject: Subject, client: Client) -> list[Client]:
    """Return two forks of a session."""
    try:
        return client.fork(2)
    except (CapacityError, ConfigurationError) as error:  # there is no room, or the server is a released one
        raise NotApplicableError(str(error)) from error
    except ServerError as error:
        if "FORKABLE" in str(error) or not _is_forkable(subject):
            raise NotApplicableError(str(error)) from error
        raise CheckError(
            f"expected snapshot and restore to return, got {error}",
            change="implement both methods, or leave FORKABLE at False",
        ) from error


def _is_forkable(subject: Subject) -> bool:
    """Whether the environment does not say of an episode here that it cannot be forked."""
    try:
        with LocalEnvironment(subject.app, subject.reset_options) as instance:
            instance.reset(seed=0)
            instance.snapshot()
    except ExecutionError as error:
        return not isinstance(error.__cause__, NotForkableError)
    except NotApplicableError:  # its code is not here
        return False
    return True


def _continue_episode(client: Client, actions: Sequence[dict[str, Any]]) -> list[Result]:
    """Play actions in the current episode, and return their results."""
    return [turn.comparable for turn in continue_turns(client, 0, actions)]


def _require_seeds(subject: Subject) -> None:
    """Raise `NotApplicableError` unless the environment promises that the seed determines the episode."""
    if not subject.manifest_or_defaults.validation.episodes.deterministic:
        raise NotApplicableError(
            "the manifest declares that seeds do not determine episodes (validation.episodes.deterministic)"
        )
    if not _takes_seed(subject):
        raise NotApplicableError("the environment's reset accepts no seed")


def _takes_seed(subject: Subject) -> bool:
    """Return whether the environment's reset accepts a seed; true if its class is not known here."""
    with suppress(NotApplicableError):
        if isinstance(factory := subject.app.factory, type):
            return "seed" in accepted_options(method_of(factory, "reset"), {"seed": 0})
    return True


def _require_repeats(subject: Subject) -> None:
    """Raise `NotApplicableError` unless seeds reproduce episodes in one process; otherwise comparing is of no use."""
    _require_seeds(subject)
    if _find_nondeterminism(subject) is not None:
        raise NotApplicableError(
            "seeds do not determine episodes even in one process; see same_seed_same_episode"
        )


def repeats(subject: Subject) -> bool:
    """Return whether the same seed gives the same episode in one process."""
    try:
        _require_repeats(subject)
    except NotApplicableError:
        return False
    return True


@lru_cache(maxsize=1)  # several checks of a subject need it
def _find_nondeterminism(subject: Subject) -> str | None:
    for seed, actions in _make_job(subject):
        first, second = (_play_fresh(subject, seed, actions) for _ in range(2))
        if (difference := find_difference(first, second)) is not None:
            return f"with seed {seed}, {difference}"
    return None


def _find_shared_attribute(subject: Subject) -> str | None:
    """Return a description of a class attribute of the environment that an episode changes, if any."""
    with suppress(NotApplicableError):  # its code is not here
        factory: Any = subject.app.factory
        attributes = dict(inspect.getmembers_static(factory))
        shared = {name: value for name, value in attributes.items() if isinstance(value, list | dict | set)}
        before = {name: repr(value) for name, value in shared.items()}
        _play_here(subject, *_make_job(subject, 1)[0])
        for name, value in shared.items():
            if repr(value) != before[name]:
                return f"the {type(value).__name__} {factory.__name__}.{name}"
    return None


def _make_job(subject: Subject, count: int = _SEEDS) -> Job:
    start = subject.limits.seed
    return [(start + number, draw_actions(subject, number)) for number in range(count)]


def _play_here(subject: Subject, seed: int, actions: Sequence[dict[str, Any]]) -> list[Result]:
    """Play an episode in a new instance of this process."""
    with LocalEnvironment(subject.app, subject.reset_options) as instance:
        return play(instance, seed, actions)


def _play_fresh(
    subject: Subject, seed: int, actions: Sequence[dict[str, Any]], url: str | None = None
) -> list[Result]:
    """Play an episode in a new session, whose instance is new."""
    with subject.client(url) as client:
        return play(client, seed, actions)


@check(CheckLevel.SEMANTIC, deadline_s=600.0)
def check_sessions_are_separate(subject: Subject) -> str:
    """Sessions that play at the same time see what each would see alone."""
    if subject.cap == 1:
        raise NotApplicableError("the server allows only one session at a time")
    with ExitStack() as stack:
        url, _ = stack.enter_context(subject.server_or_url())
        clients = _open_sessions(subject, stack, url)
        concurrent = _play_concurrently(subject, clients)
        for client in clients:
            client.close()
        isolated: list[Sequence[Result]] = []
        for number in range(len(clients)):
            with subject.client(url) as client, expect_answer("an episode"):
                isolated.append(list(_play_session(subject, client, number)))
    results_repeat = repeats(subject)
    for number, (alone, beside) in enumerate(zip(isolated, concurrent, strict=True)):
        if not results_repeat:  # the ids and counts of the states still must
            pairs = zip(alone, beside, strict=False)
            alone, beside = zip(
                *(({"state": a["state"]}, {"state": b["state"]}) for a, b in pairs), strict=True
            )
        if (difference := find_difference(alone, beside)) is not None:
            raise CheckError(
                f"expected {len(clients)} concurrent sessions not to interfere, got: in session {number}, {difference} "
                f"(alone, and beside {len(clients) - 1} others)",
                change="keep an episode's state in attributes that __init__ or reset sets on self, never on the class "
                "or in the module; if instances cannot share a process, set SUPPORTS_CONCURRENT_SESSIONS = False",
            )
    return f"{len(clients)} sessions"


def _open_sessions(subject: Subject, stack: ExitStack, url: str) -> list[Client]:
    """Open sessions; fewer than wanted, but at least two, if the server's unknown cap is lower."""
    count = min(subject.limits.sessions, subject.cap or subject.limits.sessions)
    clients: list[Client] = []
    refusal = ""
    with expect_answer(f"{count} sessions"):
        try:
            for number in range(count):
                wait_s = 0.0 if number else SLOT_WAIT_S
                client = stack.enter_context(subject.client(url, queue_timeout_s=wait_s))
                client.reset(seed=number)
                clients.append(client)
        except CapacityError as error:
            refusal = str(error)
    if refusal and subject.cap is not None:
        raise CheckError(
            f"expected room for {count} sessions, got {len(clients)}: {refusal}",
            change="set create_app's max_concurrent_envs to what the environment supports",
        )
    if len(clients) < 2:
        raise NotApplicableError("the server allows only one session at a time")
    return clients


def _play_concurrently(subject: Subject, clients: Sequence[Client]) -> list[Sequence[Result]]:
    """Play an episode in each session; all take each step at the same time."""
    episodes = [_play_session(subject, client, number) for number, client in enumerate(clients)]
    rounds = []
    pool = ThreadPoolExecutor(len(clients), thread_name_prefix="openenv-check-sessions")
    with expect_answer(f"{len(clients)} episodes at once"), pool:
        while any(results := list(pool.map(lambda episode: next(episode, None), episodes))):
            rounds.append(results)
    return [[result for result in column if result is not None] for column in zip(*rounds, strict=True)]


def _play_session(subject: Subject, client: Client, number: int) -> Iterator[Result]:
    """Play an episode; yield each result, with the episode_id and step_count of the state after it."""
    episode = turns(
        client,
        subject.limits.seed + number,
        draw_actions(subject, number, _SESSION_STEPS),
        episode_id=f"ropewalk-session-{number}",
    )
    for turn in episode:
        state = client.state()
        yield {**turn.comparable, "state": {name: state.get(name) for name in ("episode_id", "step_count")}}
