"""`ropewalk gateway`: record agents' calls of a model on another server, token for token."""

import argparse
import asyncio
import os
from pathlib import Path

from openenv_core.cli import Command
from openenv_core.evaluation.records import table_lines
from rl_bridge.cli.common import number_type, with_exit_status
from rl_bridge.config import RolloutConfig
from rl_bridge.errors import ConfigError, MissingDependencyError

MAX_PORT = 65_535
CHECK = "check"
"""In place of a checkpoint's folder: check a gateway."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "model",
        metavar="FOLDER",
        help="the checkpoint, for its tokenizer and chat template; `check` to check the gateway at URL instead",
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="the gateway to check, by requests of agents")
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="the model's server, such as http://127.0.0.1:8000/v1",
    )
    parser.add_argument("--name", metavar="NAME", help="the model's name on the server; default: FOLDER")
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help="the variable with the server's API key, or, with check, the key of the gateway's POST /episodes",
    )
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
    """Serve until Ctrl-C, or check; returns 0, 1 after a check that finds a fault, or 2 if something is missing."""
    if arguments.model == CHECK:
        return asyncio.run(check(arguments))
    if arguments.endpoint is None or arguments.url is not None:
        raise ConfigError(
            "expected FOLDER and --endpoint URL, as in `ropewalk gateway models/policy --endpoint "
            "http://127.0.0.1:8000/v1`, or `check URL`"
        )
    if not 0 <= arguments.port <= MAX_PORT:
        raise ConfigError(f"expected --port from 0 to {MAX_PORT}, got {arguments.port}")
    try:
        asyncio.run(serve(arguments))
    except KeyboardInterrupt:
        print()
    return 0


async def check(arguments: argparse.Namespace) -> int:
    """Check the gateway at a URL, and print what is wrong with it; returns the exit status."""
    from rl_bridge.gateway.check import Fault, check_gateway

    key = os.environ.get(arguments.api_key_env or "")
    if arguments.url is None or key is None:
        raise ConfigError(
            "expected `ropewalk gateway check URL --api-key-env VARIABLE`, with the gateway's key in that variable"
        )
    reports = await check_gateway(arguments.url.rstrip("/"), key)
    rows = [
        [report.name, str(report.requests), *(str(len(report.faults[fault])) for fault in Fault)]
        for report in reports
    ]
    print("\n".join(table_lines(["sequence", "requests", *Fault], rows)))
    found = [
        f"{report.name}: {fault}: {words}"
        for report in reports
        for fault in Fault
        for words in report.faults[fault]
    ]
    print("\n".join(found), end="\n" * bool(found))
    return int(bool(found))


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
    examples=(
        "ropewalk gateway models/policy --endpoint http://127.0.0.1:8000/v1 --traces traces.jsonl",
        "ropewalk gateway check http://127.0.0.1:9000 --api-key-env GATEWAY_KEY",
    ),
)
