"""`ropewalk plan`: memory, broadcast time and cost of a run, before anything is rented."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from openenv_core.cli import Command
from rl_bridge.cli.overrides import overrides_first_class
from rl_bridge.cli.reporting import exit_status
from rl_bridge.errors import ConfigError

if TYPE_CHECKING:
    from rl_bridge.config import Config
    from rl_bridge.planning.memory import ModelSize
    from rl_bridge.planning.plan import RentedFleet, RunPlan

PARTS = ("memory", "broadcast", "cost")
GBPS = "100,200,400"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar=f"{'|'.join(PARTS)} or section.key=value",
        help="what to work out, by default whatever is known enough of; and changed keys of the file",
    )
    parser.add_argument("--config", metavar="FILE", help="the run's YAML file; it need not be complete")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--parameters", metavar="N", help="of the policy, as 8B or 8e9; by default those of model.path"
    )
    memory.add_argument("--gpu_gb", type=float, metavar="GB", help="of one GPU: says what does not fit")
    broadcast = parser.add_argument_group("broadcast")
    broadcast.add_argument(
        "--gb", type=float, metavar="GB", help="what is sent; by default all parameters in float32"
    )
    broadcast.add_argument(
        "--gbps", default=GBPS, metavar="N,N", help="bandwidths, in 10^9 bits a second (%(default)s)"
    )
    broadcast.add_argument(
        "--rollout_s",
        type=float,
        metavar="S",
        help="work of a generator between two versions: its idle share",
    )
    cost = parser.add_argument_group("cost")
    cost.add_argument("--hours", type=float, metavar="H", help="how long the GPUs are rented")
    cost.add_argument(
        "--spot_gpus", type=int, metavar="N", help="by default the generators', with rollout.spot_eligible"
    )
    cost.add_argument(
        "--on_demand_gpus", type=int, metavar="N", help="by default all other GPUs of the roles"
    )
    cost.add_argument("--spot_price", type=float, metavar="X", help="of a spot GPU an hour")
    cost.add_argument("--on_demand_price", type=float, metavar="X", help="of another GPU an hour")
    cost.add_argument(
        "--spot_kind_on_demand_price",
        type=float,
        metavar="X",
        help="what a GPU of the spot kind costs on demand, where it is of another kind than the others",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Work it out and print it; returns 0, 1 where a checkpoint says nothing, 2 if it was asked for wrongly."""
    return exit_status("plan", lambda: _print(arguments))


def _print(arguments: argparse.Namespace) -> int:
    found = _plan(arguments)
    if arguments.json:
        print(json.dumps(found.as_json(gpu_gb=arguments.gpu_gb)))
    else:
        from rich.console import Console

        from rl_bridge.cli.plan_view import view

        Console().print(view(found, gpu_gb=arguments.gpu_gb), highlight=False)
    return 0


def _plan(arguments: argparse.Namespace) -> "RunPlan":
    from rl_bridge.config import load_config
    from rl_bridge.planning.memory import sent_bytes
    from rl_bridge.planning.plan import RunPlan

    named = {word for word in arguments.words if word in PARTS}
    overrides = [word for word in arguments.words if word not in PARTS]
    if overrides and arguments.config is None:
        raise ConfigError(f"expected --config with {overrides[0]!r}, or one of {', '.join(PARTS)}")
    _numbers(arguments)
    config = None if arguments.config is None else load_config(arguments.config, overrides)
    asked, found = named or set(PARTS), RunPlan()
    sent = None if arguments.gb is None else arguments.gb * 1e9
    if "memory" in asked or ("broadcast" in asked and sent is None):
        size = _size(arguments, config, needed=bool(named))
        if size is not None and "memory" in asked:
            found = found.with_memory(size, config)
        if size is not None and sent is None:
            sent = sent_bytes(size, config)
    if sent is not None and "broadcast" in asked:
        found = found.with_broadcasts(sent, _bandwidths(arguments.gbps), arguments.rollout_s, config)
    fleet = _fleet(arguments, config, needed="cost" in named) if "cost" in asked else None
    if fleet is not None:
        found = found.with_fleet(fleet)
    if found == RunPlan() and config is not None:
        raise ConfigError(
            f"expected model.path in {arguments.config}, which tells how large the policy is, got none: its task makes "
            "one when it runs; give --parameters N"
        )
    if found == RunPlan():
        raise ConfigError(
            "expected something to plan: --config FILE or --parameters N, --gb GB, or --hours and prices; got nothing"
        )
    return found


def _size(arguments: argparse.Namespace, config: "Config | None", *, needed: bool) -> "ModelSize | None":
    from rl_bridge.planning.memory import ModelSize, parse_count
    from rl_bridge.planning.plan import policy_size

    if arguments.parameters is not None:
        try:
            return ModelSize(parameters=parse_count(arguments.parameters))
        except ValueError as error:
            raise ConfigError(f"--parameters: {error}") from error
    if config is not None and (needed or config.model.path is not None):
        return policy_size(config)
    if needed:
        raise ConfigError(
            "expected --config FILE or --parameters N, to know how large the policy is; got neither"
        )
    return None


def _bandwidths(text: str) -> Sequence[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < float("inf") for each in found):
        raise ConfigError(f"expected --gbps as bandwidths above 0, such as {GBPS}, got {text!r}")
    return found


def _fleet(arguments: argparse.Namespace, config: "Config | None", *, needed: bool) -> "RentedFleet | None":
    from rl_bridge.planning.plan import RentedFleet, gpus_of

    spot, on_demand = (None, None) if config is None else gpus_of(config)
    spot = spot if arguments.spot_gpus is None else arguments.spot_gpus
    on_demand = on_demand if arguments.on_demand_gpus is None else arguments.on_demand_gpus
    told = {
        "--hours": arguments.hours,
        "--spot_gpus": spot,
        "--on_demand_gpus": on_demand,
        "--spot_price": arguments.spot_price if spot else arguments.spot_price or 0.0,
        "--on_demand_price": arguments.on_demand_price,
    }
    missing = [name for name, value in told.items() if value is None]
    if missing:
        if needed or arguments.hours is not None:
            raise ConfigError(f"expected {', '.join(missing)} to work out the cost")
        return None
    assert spot is not None
    assert on_demand is not None
    alike = arguments.spot_kind_on_demand_price
    return RentedFleet(
        spot_gpus=spot,
        on_demand_gpus=on_demand,
        spot_price=told["--spot_price"],
        on_demand_price=arguments.on_demand_price,
        spot_kind_on_demand_price=arguments.on_demand_price if alike is None else alike,
        hours=arguments.hours,
    )


def _numbers(arguments: argparse.Namespace) -> None:
    above = ("gpu_gb", "gb", "rollout_s", "hours")
    for name in (
        *above,
        "spot_gpus",
        "on_demand_gpus",
        "spot_price",
        "on_demand_price",
        "spot_kind_on_demand_price",
    ):
        value, least = getattr(arguments, name), "above 0" if name in above else "of at least 0"
        if value is not None and not (0 <= value < float("inf") and (value or name not in above)):
            raise ConfigError(f"expected --{name} {least}, got {value:g}")


COMMAND = Command(
    name="plan",
    help="work out memory, broadcast time and cost of a run before it begins",
    configure=configure,
    run=run,
    reword=overrides_first_class,
    examples=(
        "ropewalk plan --config cluster.yaml --gpu_gb 80",
        "ropewalk plan memory --parameters 70B",
        "ropewalk plan broadcast --gb 140 --gbps 100,200,400 --rollout_s 10",
        "ropewalk plan cost --spot_gpus 48 --spot_price 1.75 --on_demand_gpus 16 --on_demand_price 2.42 --hours 24",
        "ropewalk plan --config cluster.yaml --hours 24 --spot_price 1.75 --on_demand_price 2.42 --json",
    ),
)
