"""The guide's page: the file that it shows is the one that is tested, and its commands are commands."""

import argparse
import json
import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path

from doc_pages import blocks, commands, page
from module_run import ROOT

from openenv_core.cli.main import GROUP, load
from rl_bridge.cli.common import overrides_first_class
from rl_bridge.config import Config, load_config, require_trainable
from rl_bridge.planning import ModelSize, memory_of_roles
from rl_bridge.services.placement import Placement, ServiceOptions, order_for_placement
from tests.rl_bridge.planning.published_models import QWEN3_8B

GUIDE = ROOT / "tests" / "rl_bridge" / "config" / "guide.yaml"
PAGE = page("docs/guide.md")
# A name alone is a mention; what has words behind it is to be typed.
COMMANDS = re.findall(r"`((?:ropewalk \w+|python -m rl_bridge\.\w+) [^`]+)`", PAGE)
BLOCKS = [line for block in blocks(PAGE, "bash") for line in commands(block) if line.startswith("ropewalk")]


def test_the_file_is_the_one_that_is_tested_and_commands_are_taken_by_their_parsers() -> None:
    (shown,) = blocks(PAGE, "yaml")
    assert shown == GUIDE.read_text(encoding="utf-8")
    assert (len(BLOCKS), len(COMMANDS) >= 10) == (3, True)
    points = {point.name: point for point in entry_points(group=GROUP)}
    for line in COMMANDS:
        words = shlex.split(line.removeprefix("python -m rl_bridge.").removeprefix("ropewalk "))
        command = load(points[words[0]])
        parser = argparse.ArgumentParser(exit_on_error=False)
        command.configure(parser)
        rest = [re.sub(r"^N$", "3", word) for word in words[1:]]
        parser.parse_intermixed_args(rest if command.reword is None else command.reword(rest))


def training_config(line: str, *more: str) -> Config:
    words = [word for word in shlex.split(line)[2:] if word not in ("--config", "cluster.yaml")]
    return load_config(GUIDE, [*overrides_first_class(words), *more])


def test_training_as_printed_is_ready_and_finds_room(tmp_path: Path) -> None:
    many, alone = (training_config(line) for line in BLOCKS if line.startswith("ropewalk train"))
    require_trainable(many)
    require_trainable(alone)
    assert (many.monarch.roles.gpus(), alone.monarch.roles.gpus()) == (22, 0)
    # Qwen3-8B's, on GPUs of 80 GB.
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    size = ModelSize.of_folder(tmp_path)
    assert all(role.fits(80e9) for role in memory_of_roles(many, size))
    trainer, _ = memory_of_roles(load_config(GUIDE), size)
    on_each_gpu = (size.parameters * 16 / 2, trainer.process_bytes)
    assert [round(size_bytes / 1e9) for size_bytes in on_each_gpu] == [66, 78]  # as the page says
    # The roles of the cluster that is printed find room on its hosts.
    roles = many.monarch.roles
    wanted = {
        name: ServiceOptions(
            procs=role.procs, hosts=role.hosts, with_gpus=role.gpus > 0, num_replicas=role.replicas
        )
        for name, role in (("policy", roles.policy), ("trainer", roles.trainer))
    }
    placement = Placement(many.monarch.num_nodes, many.monarch.gpus_per_node)
    order = [name for name in order_for_placement(wanted) for _ in range(wanted[name].num_replicas)]
    slots = [placement.reserve(wanted[name], 0.0) for name in order]
    assert [sum(map(len, slot.gpus)) for slot in slots] == [8, *[1] * 14]
