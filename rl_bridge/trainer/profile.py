"""Traces of the trainer's steps by torch's profiler, and NCCL's flight recorder (`trainer.profile_interval`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import PolicyVersion

PROFILES = "profiles"
"""The folder of the traces, in a run's."""
RECORDED_COLLECTIVES = 2000
"""The latest collectives that NCCL's flight recorder keeps."""


@contextmanager
def trace_step(settings: TrainerSettings, rank: int, version: PolicyVersion) -> Iterator[None]:
    """Trace the block, the step from `version`, if it is due; the trace is written when it ends without an error.

    Chrome's tracing and Perfetto show `profiles/step-N-rank-R.json.gz`, where N is the iteration that ends.
    """
    interval, step = settings.config.trainer.profile_interval, version + 1
    if not interval or step % interval:
        yield
        return
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        yield
    folder = Path(settings.folder) / PROFILES
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"step-{step}-rank-{rank}.json.gz"))


def flight_recorder_environment(folder: Path) -> dict[str, str]:
    """Return the variables with which NCCL writes its latest collectives to a run's `profiles/` if one times out.

    `python -m torch.distributed.flight_recorder.fr_trace` reads the files, one of each rank.
    """
    (folder / PROFILES).mkdir(parents=True, exist_ok=True)
    return {
        "TORCH_FR_BUFFER_SIZE": str(RECORDED_COLLECTIVES),
        "TORCH_FR_DUMP_TEMP_FILE": str((folder / PROFILES).absolute() / "nccl-rank-"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
