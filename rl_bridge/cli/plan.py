"""`ropewalk plan`: memory, broadcast time and cost of a run, before anything is rented."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_core.cli import Command
from rl_bridge.cli.common import number_type, overrides_first_class, with_exit_status
from rl_bridge.errors import ConfigError

if TYPE_CHECKING:
    from rl_bridge.config import Config
    from rl_bridge.planning import ModelSize, RentedFleet, RunPlan

PARTS = ("memory", "broadcast", "cost")
GBPS = "100,200,400"
COST = {
    "hours": "hours for which the GPUs are rented",
    "spot_gpus": "spot GPUs; default: the generators', if rollout.spot_eligible",
    "on_demand_gpus": "on-demand GPUs; default: all other GPUs of the roles",
    "spot_price": "price of a spot GPU per hour",
    "on_demand_price": "price of an on-demand GPU per hour",
    "spot_kind_on_demand_price": "on-demand price of the spot kind of GPU; default: on_demand_price",
}
"""Options of `ropewalk plan cost`, with their help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar=f"{'|'.join(PARTS)} or section.key=value",
        help="what to estimate (default: whatever enough is known for), and overrides of the file's keys",
    )
    parser.add_argument("--config", metavar="FILE", help="the run's YAML file; it need not be complete")
    memory, broadcast, cost = (parser.add_argument_group(title) for title in PARTS)
    memory.add_argument(
        "--parameters",
        metavar="N",
        help="the policy's parameters, such as 8B or 8e9; default: those of model.path",
    )
    text = "memory of one GPU; shows what does not fit, and what is left for the key-value cache"
    memory.add_argument("--gpu_gb", type=number_type("--gpu_gb", float), metavar="GB", help=text)
    text = "size of one version of the weights; default: all parameters, 2 bytes each without a file"
    broadcast.add_argument("--gb", type=number_type("--gb", float), metavar="GB", help=text)
    text = "seconds that a generator works between two versions; shows its idle share"
    broadcast.add_argument("--rollout_s", type=number_type("--rollout_s", float), metavar="S", help=text)
    text = "bandwidths to compare, in 10^9 bits per second (default: %(default)s)"
    broadcast.add_argument("--gbps", type=_parse_bandwidths, default=GBPS, metavar="N,N", help=text)
    for name, text in COST.items():
        is_count, option = name.endswith("gpus"), f"--{name}"
        kind = number_type(option, int, least=0) if is_count else number_type(option, float, least=0)
        cost.add_argument(option, type=kind, metavar="N" if is_count else "X", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _parse_bandwidths(text: str) -> list[float]:
    return [number_type("--gbps", float)(value) for value in text.split(",")]


@with_exit_status("plan")
def run(arguments: argparse.Namespace) -> int:
    """Compute the plan and print it; returns 0, 1 if a checkpoint cannot be read, 2 for a bad command line."""
    plan = _make_plan(arguments)
    if arguments.json:
        print(json.dumps(plan.as_json(gpu_gb=arguments.gpu_gb)))
    else:
        from rich.console import Console

        from rl_bridge.cli.plan_view import render_plan

        Console().print(render_plan(plan, gpu_gb=arguments.gpu_gb), highlight=False)
    return 0


def _make_plan(arguments: argparse.Namespace) -> "RunPlan":
    from rl_bridge.config import load_config
    from rl_bridge.planning import RunPlan, sent_bytes

    named_parts = {argument for argument in arguments.arguments if argument in PARTS}
    overrides = [argument for argument in arguments.arguments if argument not in PARTS]
    if overrides and arguments.config is None:
        raise ConfigError(f"expected --config with {overrides[0]!r}, or one of {', '.join(PARTS)}")
    config = None if arguments.config is None else load_config(arguments.config, overrides)
    sections, plan = named_parts or set(PARTS), RunPlan()
    sent = None if arguments.gb is None else arguments.gb * 1e9
    if "memory" in sections or ("broadcast" in sections and sent is None):
        size = _read_size(arguments, config, needed=bool(named_parts))
        if size is not None and "memory" in sections:
            gpu_bytes = None if arguments.gpu_gb is None else arguments.gpu_gb * 1e9
            plan = plan.with_memory(size, config, gpu_bytes=gpu_bytes)
        if size is not None and sent is None:
            sent = sent_bytes(size, config)
    if sent is not None and "broadcast" in sections:
        plan = plan.with_broadcasts(sent, arguments.gbps, arguments.rollout_s, config)
    if "cost" in sections:
        plan = replace(plan, fleet=_read_fleet(arguments, config, needed="cost" in named_parts))
    if plan == RunPlan():
        raise ConfigError(
            "expected something to plan: --config FILE or --parameters N, --gb GB, or --hours and prices; got nothing"
            if config is None
            else f"expected model.path in {arguments.config}, which tells how large the policy is, got none: its task "
            "makes one when it runs; give --parameters N"
        )
    return plan


def _read_size(arguments: argparse.Namespace, config: "Config | None", *, needed: bool) -> "ModelSize | None":
    from rl_bridge.planning import ModelSize, parse_count

    if arguments.parameters is not None:
        try:
            return ModelSize(parameters=parse_count(arguments.parameters))
        except ValueError as error:
            raise ConfigError(f"--parameters: {error}") from error
    path = None if config is None else config.model.path
    if path is None and needed:
        raise ConfigError(
            "expected --parameters N, or --config FILE with model.path, to know how large the policy is; got neither"
        )
    return None if path is None else ModelSize.of_folder(Path(os.path.expanduser(path)))


def _read_fleet(
    arguments: argparse.Namespace, config: "Config | None", *, needed: bool
) -> "RentedFleet | None":
    from rl_bridge.planning import RentedFleet, split_spot_gpus

    values = {name: getattr(arguments, name) for name in COST}
    if config is not None:
        for name, count in zip(("spot_gpus", "on_demand_gpus"), split_spot_gpus(config), strict=True):
            values[name] = count if values[name] is None else values[name]
    if not values["spot_gpus"]:
        values["spot_price"] = values["spot_price"] or 0.0
    if values["spot_kind_on_demand_price"] is None:
        values["spot_kind_on_demand_price"] = values["on_demand_price"]
    missing = [f"--{name}" for name in list(values)[:-1] if values[name] is None]
    if not missing:
        return RentedFleet(**values)
    if needed or arguments.hours is not None:
        raise ConfigError(f"expected {', '.join(missing)} to work out the cost")
    return None


COMMAND = Command(
    name="plan",
    help="estimate memory, broadcast time and cost of a run before it starts",
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
