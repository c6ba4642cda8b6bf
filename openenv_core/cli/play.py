"""`ropewalk play`: steps an environment in the terminal."""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from openenv_core.cli.command import Command, read_count, read_object, read_seconds, sanitize
from openenv_core.errors import ConfigurationError, ExecutionError, OpenEnvError

if TYPE_CHECKING:
    from openenv_core.play.game import Game
    from openenv_core.targets import RunningTarget, Target

TIMEOUT_S: Final = 60.0
"""Default timeout of a reset or step."""

SCHEMA_TIMEOUT_S: Final = 10.0
"""Timeout of the request for the server's schemas."""

TRACEBACK_WAIT_S: Final = 2.0
"""How long, in seconds, to wait for a traceback in the server's output."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `play`."""
    add = parser.add_argument
    add(
        "target",
        metavar="NAME|PATH|MODULE:ATTRIBUTE|URL|IMAGE",
        help="the environment; unless it is a URL, it is served until the game ends",
    )
    add("--seed", type=int, help="seed of the first reset, and of the actions of --random")
    add(
        "--seat",
        help='the seat to play in a game of several players, or "all"; the server\'s policies play the others',
    )
    add("--table", metavar="NAME", help="play with others who name the same table, of a server at a URL")
    add("--reset", metavar="JSON", type=read_object, default={}, help="further options of every reset")
    add(
        "--action",
        metavar="JSON",
        type=read_object,
        action="append",
        help="take this step without a prompt; may be given several times, for one episode",
    )
    add("--random", metavar="N", type=read_count, help="take N steps with actions drawn from the schema")
    add("--json", action="store_true", help="print one JSON object per line: resets, steps, episodes, errors")
    add(
        "--timeout",
        metavar="SECONDS",
        type=read_seconds,
        help="timeout of a reset or step; 0 means none (60; none at a table, where others are waited for)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Play; return 1 if something failed and the input is not interactive."""
    from openenv_core.play.game import Game, play_actions, play_at_random
    from openenv_core.play.terminal import Terminal
    from openenv_core.targets import TargetKind, run_target, target_of

    if arguments.action and arguments.random:
        raise ConfigurationError("both --action and --random are given; leave one out")
    terminal = Terminal(is_json=arguments.json)
    target = target_of(arguments.target)
    token = (os.environ.get("ROPEWALK_TOKEN") or None) if target.kind is TargetKind.URL else None
    options = _options(arguments)
    with run_target(target) as running:
        from openenv_core.client import GenericEnvClient

        schema = _action_schema(running.url, token)
        timeout_s = arguments.timeout
        if timeout_s is None and "table" not in options:
            timeout_s = TIMEOUT_S
        with GenericEnvClient(running.url, token=token, message_timeout_s=timeout_s or None).sync() as client:
            game = Game(client, terminal)
            try:
                if arguments.action:
                    play_actions(game, arguments.action, options)
                elif arguments.random:
                    drawn = _draw_actions(arguments.seed, game, target, schema, options)
                    play_at_random(game, islice(drawn, arguments.random), options)
                else:
                    return _play_interactively(arguments.target, game, schema, running, options)
                game.end_episode()
                return 0
            except (KeyboardInterrupt, OpenEnvError) as error:
                _show_traceback(running.provider, error)
                if isinstance(error, KeyboardInterrupt):
                    terminal.say()  # below the prompt
                game.end_episode()
                raise


def _play_interactively(
    name: str, game: "Game", schema: dict[str, Any] | None, running: "RunningTarget", options: dict[str, Any]
) -> int:
    from openenv_core.play.form import forms_of
    from openenv_core.play.game import Loop
    from openenv_core.play.prompts import Prompts, describe_form
    from openenv_core.providers.base import has_died

    forms = () if schema is None else forms_of(schema)
    game.terminal.say(f"{name} on {running.url}   (:help for commands)")
    for form in forms:
        for line in () if form.lists_tools or form.calls_tools else describe_form(form):
            game.terminal.say(line)
    return Loop(
        game,
        Prompts(game.terminal, forms),
        options=options,
        is_server_alive=lambda timeout_s: not has_died(running.provider, within_s=timeout_s),
        explain=partial(_show_traceback, running.provider),
    ).run()


def _draw_actions(
    seed: int | None, game: "Game", target: "Target", schema: dict[str, Any] | None, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield valid actions: the author's examples if any, otherwise samples from the schema."""
    from openenv_core.checker.drawing import pool
    from openenv_core.targets import declared_by

    if schema is None:
        raise ConfigurationError("the server has no /schema, which --random needs; give --action")
    examples: list[dict[str, Any]] = []
    with suppress(ConfigurationError):  # `ropewalk validate` reports an invalid manifest
        examples = declared_by(target).validation.episodes.example_actions

    def tools() -> list[dict[str, Any]]:
        game.reset(options)
        return game.tools()

    seed = random.randrange(2**32) if seed is None else seed
    return pool(schema, examples, tools, seed).draw(random.Random(seed))


def _show_traceback(provider: Any, error: BaseException) -> None:
    """Print the environment's traceback from the output of a server that this command started."""
    from openenv_core.providers.process import LocalProcessProvider, last_traceback

    if not isinstance(error, ExecutionError) or not isinstance(provider, LocalProcessProvider):
        return
    deadline = time.monotonic() + TRACEBACK_WAIT_S
    # The reply may arrive before the server's earlier output was read.
    while not (traceback_text := last_traceback(provider.output())) and time.monotonic() < deadline:
        time.sleep(0.02)
    if traceback_text:
        print(sanitize(traceback_text), file=sys.stderr)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("seed", "seat", "table")}
    return {**arguments.reset, **{name: value for name, value in given.items() if value is not None}}


def _action_schema(url: str, token: str | None) -> dict[str, Any] | None:
    """Return the schema of actions of the server's /schema; None if it is missing or unusable."""
    from openenv_core.adapters.episode import fetch_schema

    try:
        reply = asyncio.run(fetch_schema(url, token=token, timeout_s=SCHEMA_TIMEOUT_S))
    except OpenEnvError:
        return None  # opening the session will report the problem
    schema: dict[str, Any] = reply["action"]
    return schema


COMMAND = Command(
    name="play",
    help="step an environment in the terminal",
    configure=configure,
    run=run,
    examples=(
        "ropewalk play blackjack --seed 7",
        "ropewalk play .",
        "ropewalk play http://127.0.0.1:8000",
        "ropewalk play blackjack-env:latest --random 20 --json",
        "ropewalk play kuhn --seat second",
        "ropewalk play http://127.0.0.1:8000 --table ours --seat first",
        """ropewalk play blackjack --seed 3 --action '{"action": "hit"}' --action '{"action": "stand"}'""",
    ),
)
