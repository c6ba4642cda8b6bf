"""Checkpoints: written to their end, or not there at all."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from rl_bridge.config import LoraConfig
from rl_bridge.errors import CheckpointError, ModelError
from rl_bridge.titan.ranks import agree, is_of_siblings
from rl_bridge.trainer.settings import ResumeState
from rl_bridge.types import PolicyVersion
from rl_bridge.weights.peft import write_adapter

KEEP = 2
"""Checkpoints that stay: one more than is needed, in case the newest is damaged."""
FOLDER = "checkpoint"
_RUN, _ATTACHMENTS = "run.json", "attachments"
_WHOLE = re.compile(r"step-(\d+)")
_PARTIAL = ".partial"
_REPLACED = ".replaced" + _PARTIAL
"""Of a checkpoint that is whole, until there is another of its version."""


class Checkpoints:
    """The checkpoints of one run, each a folder `checkpoint/step-N` in the run's.

    One is written as `step-N.partial`, brought to the disk, and then given its name: a folder with the name is whole.
    All ranks call every method.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / FOLDER
        self._first = dist.get_rank() == 0

    def newest(self) -> PolicyVersion:
        """The version of the newest one, as rank 0 sees it; 0 where there is none."""
        found: list[PolicyVersion] = [max(_versions(self._folder), default=0)]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def sweep(self) -> None:
        """Remove what killed trainers left half-written, and give one that was being replaced its name again."""
        if self._first:
            for replaced in self._folder.glob(f"*{_REPLACED}"):
                if not (final := replaced.with_name(replaced.name.removesuffix(_REPLACED))).exists():
                    replaced.rename(final)
            for left in self._folder.glob(f"*{_PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self,
        version: PolicyVersion,
        state: Mapping[str, Any],
        run_state: Mapping[str, Any],
        attachments: Mapping[str, bytes],
    ) -> None:
        """Write a checkpoint, and remove those that are no longer kept.

        Args:
            version: Names it; one of the same version is replaced.
            state: Tensors, DTensors, numbers and stateful objects, nested in dicts.
            run_state: What can be written as JSON.
            attachments: Bytes by the names of files.

        Raises:
            CheckpointError: It could not be written. Older ones are as they were, and nothing of it is left.
        """
        final = self._folder / f"step-{version}"
        partial = final.with_name(final.name + _PARTIAL)
        failure: Exception | None = None
        try:
            self._together(lambda: _begin(partial, version, run_state, attachments))
            self._together(lambda: _write_state(partial, state), everywhere=True)
            self._together(lambda: self._finish(partial, final))
        except _WriteError as error:
            failure = error
        if failure is not None:
            if self._first:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint of version {version} to {str(self._folder)!r}: {failure}; older ones are "
                "whole. See that there is room, then go on from the newest: ropewalk train --resume "
                f"{self._folder.parent!s}"
            )

    def load(self, version: PolicyVersion, state: dict[str, Any]) -> None:
        """Read the weights and all else of `state` in place.

        Raises:
            ModelError: The checkpoint is damaged, or of another model.
        """
        path = self._folder / f"step-{version}"
        with _damaged(path):
            load_distributed(state, storage_reader=FileSystemReader(path))

    def below(self, key: str, version: PolicyVersion) -> set[str]:
        """The names that a checkpoint has below a key of its state.

        Raises:
            ModelError: The checkpoint is damaged.
        """
        path = self._folder / f"step-{version}"
        with _damaged(path):
            names = FileSystemReader(path).read_metadata().state_dict_metadata
        return {name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}.")}

    def run_state(self, version: PolicyVersion) -> ResumeState:
        """What the controller stored with a checkpoint."""
        path = self._folder / f"step-{version}"
        with _damaged(path):
            note: dict[str, Any] = json.loads((path / _RUN).read_text(encoding="utf-8"))
            attachments = {file.name: file.read_bytes() for file in sorted((path / _ATTACHMENTS).iterdir())}
            return ResumeState(version=version, run_state=note["run_state"], attachments=attachments)

    def _finish(self, partial: Path, final: Path) -> None:
        _sync(partial)
        before = _aside(final, _REPLACED) if final.exists() else None
        partial.rename(final)
        _sync(self._folder)
        if before is not None:  # not sooner: removing takes its time, and there has to be one that is whole
            shutil.rmtree(before)
        for version in sorted(_versions(self._folder))[:-KEEP]:
            _remove(self._folder / f"step-{version}")

    def _together(self, work: Callable[[], None], *, everywhere: bool = False) -> None:
        """Let rank 0, or every rank, do something; all of them learn of a failure."""
        failure = None
        if self._first or everywhere:
            try:
                work()
            except (Exception, CheckpointException) as error:
                failure = _reason(error)
        if (failure := agree(failure)) is not None:
            raise _WriteError(failure)


class _WriteError(Exception):
    """A part of a checkpoint could not be written, by this rank or another."""


@contextmanager
def _damaged(checkpoint: Path) -> Iterator[None]:
    """What cannot be read within the block is the checkpoint's fault, unless a sibling is gone."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        if is_of_siblings(error):
            raise
        raise ModelError(
            f"cannot resume from the checkpoint {str(checkpoint)!r}: {_reason(error)}; "
            "remove it to go on from the one before"
        ) from error


def newest_checkpoint(folder: str | Path) -> PolicyVersion:
    """The version of a run's newest checkpoint, for who is no rank; 0 where there is none."""
    return max(_versions(Path(folder) / FOLDER), default=0)


def _versions(folder: Path) -> list[PolicyVersion]:
    names = (_WHOLE.fullmatch(path.name) for path in folder.glob("step-*"))
    return [int(name[1]) for name in names if name is not None]


def _begin(
    partial: Path, version: PolicyVersion, run_state: Mapping[str, Any], attachments: Mapping[str, bytes]
) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    (partial / _ATTACHMENTS).mkdir(parents=True)
    note = {"version": version, "run_state": run_state}
    _write(partial / _RUN, json.dumps(note, allow_nan=False).encode())
    for name, content in attachments.items():
        _write(partial / _ATTACHMENTS / name, content)
    _sync(partial / _ATTACHMENTS)


def _write_state(partial: Path, state: Mapping[str, Any]) -> None:
    save_distributed(dict(state), storage_writer=FileSystemWriter(partial))  # which syncs its files


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint so that it is never taken for a whole one, wherever this is interrupted."""
    shutil.rmtree(_aside(checkpoint, ".old" + _PARTIAL))


def _aside(checkpoint: Path, suffix: str) -> Path:
    doomed = checkpoint.with_name(checkpoint.name + suffix)
    checkpoint.rename(doomed)
    return doomed


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    return str(error) or type(error).__name__


def export_weights(state: Mapping[str, Tensor], folder: Path) -> str | None:
    """Write weights as `model.safetensors`; returns why that failed, or None.

    The file gets its name when it is whole.
    """
    final = folder / "model.safetensors"
    partial = final.with_name(final.name + _PARTIAL)
    try:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in state.items()},
            str(partial),
            metadata={"format": "pt"},
        )
        partial.rename(final)
    except Exception as error:
        partial.unlink(missing_ok=True)
        return _reason(error)
    return None


def export_adapter(factors: Mapping[str, Tensor], folder: Path, lora: LoraConfig, base: str) -> str | None:
    """Write adapters as PEFT stores them; returns why that failed, or None."""
    try:
        write_adapter(folder, factors, lora, base=base)
    except Exception as error:
        return _reason(error)
    return None
