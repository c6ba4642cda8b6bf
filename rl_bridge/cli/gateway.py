"""`ropewalk gateway`: record agents' calls of a model on another server, token for token."""

import argparse
import asyncio
from pathlib import Path

from openenv_core.cli import Command
from rl_bridge.cli.common import number_type, with_exit_status
from rl_bridge.config import RolloutConfig
from rl_bridge.errors import ConfigError, MissingDependencyError

MAX_PORT = 65_535


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", metavar="FOLDER", help="the checkpoint, for its tokenizer and chat template")
    parser.add_argument(
        "--endpoint",
        required=True,
        metavar="URL",
        help="the model's server, such as http://127.0.0.1:8000/v1",
    )
    parser.add_argument("--name", metavar="NAME", help="the model's name on the server; default: FOLDER")
    parser.add_argument("--api-key-env", metavar="VARIABLE", help="the variable with the server's API key")
    parser.add_argument("--traces", type=Path, metavar="FILE", help="append the trace of each episode")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    for option, default, text in (
        ("--max-length", 32_768, "the most tokens of prompt and answer together"),
        ("--max-tokens", 2_048, "the most tokens of an answer"),
        ("--requests", 64, "the most requests to the server at once"),
    ):
        parser.add_argument(
            option,
            type=number_type(option, int),
            default=default,
            metavar="N",
            help=f"{text}; default: %(default)s",
        )
    parser.add_argument(
        "--temperature",
        type=number_type("--temperature", float, least=0.01),
        default=1.0,
        metavar="T",
        help="of all answers; default: %(default)s",
    )


@with_exit_status("gateway")
def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns 0, or 2 if the server does not give what is needed."""
    if not 0 <= arguments.port <= MAX_PORT:
        raise ConfigError(f"expected --port from 0 to {MAX_PORT}, got {arguments.port}")
    try:
        asyncio.run(serve(arguments))
    except KeyboardInterrupt:
        print()
    return 0


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until cancelled."""
    try:
        from rl_bridge.gateway.app import GatewayServer
        from rl_bridge.gateway.service import GatewayService
    except ImportError as error:
        raise MissingDependencyError.of_import(error) from error
    from rl_bridge.gateway.episode import CallSettings
    from rl_bridge.gateway.upstream import upstream_policy
    from rl_bridge.generator.endpoint import Endpoint
    from rl_bridge.tokens.chat import ChatTokenizer

    rollout = RolloutConfig(
        max_length=arguments.max_length,
        max_new_tokens=arguments.max_tokens,
        max_num_seqs=arguments.requests,
        temperature=arguments.temperature,
    )
    name = arguments.model if arguments.name is None else arguments.name
    endpoint = Endpoint(url=arguments.endpoint, model=name, key_variable=arguments.api_key_env)
    async with upstream_policy(endpoint, ChatTokenizer(arguments.model), rollout) as policy:
        service = GatewayService(policy, CallSettings(temperature=arguments.temperature), arguments.traces)
        server = GatewayServer(service.gateway, host=arguments.host, port=arguments.port)
        await server.start()
        try:
            print(
                f"{server.url} serves {name} for agents, until Ctrl-C; the key of POST /episodes is {service.key}"
            )
            await asyncio.get_running_loop().create_future()
        finally:
            await server.close()


COMMAND = Command(
    name="gateway",
    help="record agents' calls of a model on another server, token for token",
    configure=configure,
    run=run,
    examples=("ropewalk gateway models/policy --endpoint http://127.0.0.1:8000/v1 --traces traces.jsonl",),
)
