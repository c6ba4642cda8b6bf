"""Models on two real ranks, each a process of its own: what they compute, for a test to compare."""

import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tiny_checkpoints import logprobs, rows

WAIT_S = 240.0
"""A bound for what would hang otherwise; none is meant to come near it."""
LEARNING_RATE = 1e-2


def on_two_ranks(folder: Path, checkpoints: dict[str, Path], *, tensor: int) -> list[dict[str, Any]]:
    """What `computed` says of each checkpoint on every rank.

    Args:
        folder: For the meeting's file.
        checkpoints: By name.
        tensor: Ranks that share every matrix.
    """
    context = get_context("spawn")
    meeting = folder / f".meeting-{os.urandom(4).hex()}"
    ends: list[Connection] = []
    processes = []
    for index in range(2):
        ours, theirs = context.Pipe()
        processes.append(
            context.Process(target=_serve, args=(index, meeting, checkpoints, tensor, theirs), daemon=True)
        )
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    try:
        answers = []
        for end in ends:
            if not end.poll(WAIT_S):
                raise TimeoutError("a rank did not answer")
            answers.append(end.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join(WAIT_S)


def computed(path: Path, *, tensor: int = 1) -> dict[str, dict[str, Any]]:
    """What a policy and a critic say of some rows, and their weights after an update.

    The rows are all given to every rank, so that gradients summed over data-parallel ranks are so many times as large;
    they are divided here.
    """
    import torch

    from rl_bridge.titan.critic import CriticModel
    from rl_bridge.titan.model import Parallelism, TitanDecoder, TitanModel

    options: dict[str, Any] = {
        "dtype": "float32",
        "max_length": 32,
        "trainable": True,
        "device": torch.device("cpu"),
        "spread": Parallelism(tensor=tensor),
    }
    tokens = rows(length=18)
    found: dict[str, dict[str, Any]] = {}
    model: TitanDecoder
    for kind, model in {
        "policy": TitanModel(path, **options),
        "critic": CriticModel(path, **options),
    }.items():
        if isinstance(model, CriticModel):
            _draw_head(model)
        optimizer = torch.optim.SGD(model.module.parameters(), lr=LEARNING_RATE)
        with model.spmd():
            outputs = model.outputs(tokens)
            chosen = outputs.squeeze(-1) if kind == "critic" else logprobs(outputs, tokens)
            (chosen.square().sum() / model.data_ranks).backward()
        optimizer.step()
        weights = model.adapter.to_hf(model.module.state_dict())
        held = sum(one.to_local().numel() for one in model.module.parameters())
        found[kind] = {
            "outputs": outputs.detach().numpy(),
            "weights": {name: one.detach().full_tensor().numpy().copy() for name, one in weights.items()},
            "held": held,
        }
    return found


def _draw_head(model: Any) -> None:
    import torch
    from torch.distributed.tensor import distribute_tensor

    head = model.module.lm_head.weight
    drawn = torch.randn(head.shape, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        head.copy_(distribute_tensor(drawn, head.device_mesh, head.placements))


def _serve(index: int, meeting: Path, checkpoints: dict[str, Path], tensor: int, end: Connection) -> None:
    import torch

    from rl_bridge.titan.ranks import Rank, join_process_group

    try:
        torch.set_num_threads(1)
        rank = Rank(index=index, count=2, meeting=meeting, timeout_s=WAIT_S)
        join_process_group(torch.device("cpu"), rank)
        end.send({name: computed(path, tensor=tensor) for name, path in checkpoints.items()})
        end.poll(WAIT_S)  # the other may still need this one
    except Exception as error:
        end.send(error)
