"""Checkpoints, written concurrently with training, and exports; both appear only when they are complete."""

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.stateful import Stateful

from rl_bridge.config import LoraConfig
from rl_bridge.errors import CheckpointError, ModelError
from rl_bridge.files import sync, write_synced
from rl_bridge.titan.ranks import agree, convert_rank_errors, gather_state, is_rank_error
from rl_bridge.trainer.settings import ResumeState
from rl_bridge.types import PolicyVersion
from rl_bridge.weights.peft import write_adapter
from rl_bridge.weights.snapshot import State

T = TypeVar("T")

MAX_KEPT = 2
"""The number of checkpoints kept: one more than is needed, in case the newest is damaged."""
FOLDER = "checkpoint"
_RUN, _ATTACHMENTS = "run.json", "attachments"
_STEP_PATTERN = re.compile(r"step-(\d+)")
_PARTIAL_SUFFIX = ".partial"
_DAMAGED_SUFFIX = ".damaged"
SHARD_BYTES = 5_000_000_000
"""The most bytes of each file of an export."""
INDEX = "model.safetensors.index.json"
_REPLACED_SUFFIX = ".replaced" + _PARTIAL_SUFFIX
"""The suffix of a complete checkpoint while another one of its version replaces it."""
_OLD_SUFFIX = ".old" + _PARTIAL_SUFFIX
"""The suffix of a checkpoint that is being removed."""


class Checkpoints:
    """The checkpoints of one run, each a folder `checkpoint/step-N` in the run's folder.

    A checkpoint is written as `step-N.partial`, synced to disk and then renamed, so a folder `step-N` is complete. A
    thread writes it from a copy in the host's memory while training goes on. All ranks call every method.

    Attributes:
        group: The process group for waits during writes, which may take longer than other collectives.
    """

    def __init__(self, folder: str | Path, *, timeout_s: float) -> None:
        self._folder = Path(folder) / FOLDER
        self._is_first_rank = dist.get_rank() == 0
        self._timeout_s = timeout_s
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._write_future: Future[None] | None = None
        pinned = torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(pinned, False, False, False))

    def newest(self, read: Callable[[PolicyVersion], T]) -> tuple[T | None, tuple[str, ...]]:
        """Return `read`'s result for the newest readable checkpoint, or None, and what was wrong with newer ones.

        The newer ones are renamed to `step-N.damaged` once an older one has been read: if none can be read, the model
        or the disk may be at fault instead.

        Raises:
            ModelError: There are checkpoints, and none can be read.
        """
        versions = [sorted(_list_versions(self._folder), reverse=True)]  # those of rank 0 are broadcast
        dist.broadcast_object_list(versions, src=0)
        damaged: dict[PolicyVersion, str] = {}
        for version in versions[0]:
            try:
                result = read(version)
            except _DamagedError as error:
                damaged[version] = str(error)
                continue
            return result, tuple(self._rename_damaged(*item) for item in damaged.items())
        if damaged:
            raise ModelError(
                f"cannot resume from any checkpoint of the run: {'; '.join(damaged.values())}; see that the disk and "
                f"model.path are what they were. Without {str(self._folder)!r} the run begins anew"
            )
        return None, ()

    def _rename_damaged(self, version: PolicyVersion, reason: str) -> str:
        path = self._folder / f"step-{version}"
        if self._is_first_rank:
            shutil.rmtree(path.with_name(path.name + _DAMAGED_SUFFIX), ignore_errors=True)
            _rename_with_suffix(path, _DAMAGED_SUFFIX)
        return f"{reason}; it is set aside as {path.name}{_DAMAGED_SUFFIX}, going on from the one before"

    def sweep(self) -> None:
        """Remove half-written checkpoints of killed trainers, and restore one whose replacement was interrupted."""
        if self._is_first_rank:
            for replaced in self._folder.glob(f"*{_REPLACED_SUFFIX}"):
                if not (
                    original := replaced.with_name(replaced.name.removesuffix(_REPLACED_SUFFIX))
                ).exists():
                    replaced.rename(original)
            for partial in self._folder.glob(f"*{_PARTIAL_SUFFIX}"):
                shutil.rmtree(partial, ignore_errors=True)

    def save(
        self,
        version: PolicyVersion,
        state: Mapping[str, Any],
        run_state: Mapping[str, Any],
        attachments: Mapping[str, bytes],
    ) -> None:
        """Start writing a checkpoint, after waiting for the previous write; older ones beyond `MAX_KEPT` are removed.

        A checkpoint of the same version is replaced. `state` (tensors, DTensors, numbers and stateful objects, nested
        in dicts) may change afterwards; `run_state` is JSON, `attachments` are bytes by file name.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        self.finish()
        values = {
            key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()
        }
        staged: Any = self._stager.stage(values)
        self._write_future = self._thread.submit(self._write, version, staged, run_state, attachments)

    def check(self) -> None:
        """Call `finish` if all ranks have finished writing, and so raise its error; never wait for a write."""
        if self._write_future is not None and agree(None if self._write_future.done() else "not yet") is None:
            self.finish()

    def wait(self) -> None:
        """Wait on any thread until the write in progress has ended, well or not; `finish` raises its error."""
        if (writing := self._write_future) is not None:
            wait({writing}, self._timeout_s)

    def finish(self) -> None:
        """Wait for the write in progress; CheckpointError if it is late, or fails, and then nothing of it is left."""
        write_future, self._write_future = self._write_future, None
        if write_future is None:
            return
        try:
            write_future.result(self._timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"expected a checkpoint to be written to {str(self._folder)!r} within {self._timeout_s:g} s, it is "
                "not; see what is slow there, or raise trainer.timeout_s"
            ) from None

    def close(self) -> None:
        """Finish, and end the thread."""
        try:
            self.finish()
        finally:
            self._thread.shutdown(wait=False)

    def _write(
        self,
        version: PolicyVersion,
        state: Mapping[str, Any],
        run_state: Mapping[str, Any],
        attachments: Mapping[str, bytes],
    ) -> None:
        final = self._folder / f"step-{version}"
        partial = final.with_name(final.name + _PARTIAL_SUFFIX)
        failure: Exception | None = None
        try:
            with convert_rank_errors(f"for the checkpoint of version {version}"):
                self._run_and_agree(lambda: _write_run_state(partial, version, run_state, attachments))
                writer = FileSystemWriter(partial)  # which syncs its files
                save = functools.partial(
                    save_distributed, dict(state), storage_writer=writer, process_group=self.group
                )
                self._run_and_agree(save, on_every_rank=True)
                self._run_and_agree(lambda: self._finish(partial, final))
        except _WriteError as error:
            failure = error
        if failure is not None:
            if self._is_first_rank:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint of version {version} to {str(self._folder)!r}: {failure}; older ones are "
                "complete. Check that there is room, then resume from the newest: ropewalk train --resume "
                f"{self._folder.parent!s}"
            )

    def load(self, version: PolicyVersion, state: dict[str, Any]) -> None:
        """Read a checkpoint into the tensors and objects of `state`, in place."""
        path = self._folder / f"step-{version}"
        with _agree_on_damage(path):
            load_distributed(state, storage_reader=FileSystemReader(path))

    def names_below(self, key: str, version: PolicyVersion) -> set[str]:
        """Return the names that a checkpoint has below a key of its state."""
        path = self._folder / f"step-{version}"
        with _agree_on_damage(path):
            names = FileSystemReader(path).read_metadata().state_dict_metadata
        return {name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}.")}

    def run_state(self, version: PolicyVersion) -> ResumeState:
        """Return the controller's state in a checkpoint."""
        path = self._folder / f"step-{version}"
        with _agree_on_damage(path):
            document: dict[str, Any] = json.loads((path / _RUN).read_text(encoding="utf-8"))
            attachments = {file.name: file.read_bytes() for file in sorted((path / _ATTACHMENTS).iterdir())}
            if (
                document.get("digests", (digests := _hash_attachments(attachments))) != digests
            ):  # older ones have none
                raise ValueError("its attachments are not those that were written")
            return ResumeState(version=version, run_state=document["run_state"], attachments=attachments)

    def _finish(self, partial: Path, final: Path) -> None:
        sync(partial)
        replaced = _rename_with_suffix(final, _REPLACED_SUFFIX) if final.exists() else None
        partial.rename(final)
        sync(self._folder)
        # The new checkpoint is complete. If older ones cannot be removed, for example because they are being read over
        # NFS, the run goes on; `sweep` tries again.
        if replaced is not None:  # only now: removing takes a while, and there must always be a complete one
            shutil.rmtree(replaced, ignore_errors=True)
        for version in sorted(_list_versions(self._folder))[:-MAX_KEPT]:
            # Renamed first, so that it is never taken for a complete one if the removal is interrupted.
            shutil.rmtree(
                _rename_with_suffix(self._folder / f"step-{version}", _OLD_SUFFIX), ignore_errors=True
            )

    def _run_and_agree(self, work: Callable[[], None], *, on_every_rank: bool = False) -> None:
        """Run a function on rank 0, or on every rank; a failure is raised on all of them."""
        failure = None
        if self._is_first_rank or on_every_rank:
            try:
                work()
            except (Exception, CheckpointException) as error:
                failure = _describe_error(error)
        if (failure := agree(failure, self.group)) is not None:
            raise _WriteError(failure)


class _WriteError(Exception):
    """A part of a checkpoint could not be written, by this rank or another."""


class _DamagedError(ModelError):
    """A checkpoint cannot be read, by this rank or another."""


@contextmanager
def _agree_on_damage(checkpoint: Path) -> Iterator[None]:
    """Raise _DamagedError on all ranks if any rank fails to read within the block, unless a rank is gone."""
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        if is_rank_error(error):
            raise
        failure = error
    if (reason := agree(None if failure is None else _describe_error(failure))) is not None:
        raise _DamagedError(f"cannot resume from the checkpoint {str(checkpoint)!r}: {reason}") from failure


def newest_checkpoint(folder: str | Path) -> PolicyVersion:
    """Return the version of a run's newest checkpoint, outside of the trainer; 0 if there is none."""
    return max(_list_versions(Path(folder) / FOLDER), default=0)


def _list_versions(folder: Path) -> list[PolicyVersion]:
    names = (_STEP_PATTERN.fullmatch(path.name) for path in folder.glob("step-*"))
    return [int(name[1]) for name in names if name is not None]


def _write_run_state(
    partial: Path, version: PolicyVersion, run_state: Mapping[str, Any], attachments: Mapping[str, bytes]
) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    (partial / _ATTACHMENTS).mkdir(parents=True)
    document = {"version": version, "run_state": run_state, "digests": _hash_attachments(attachments)}
    write_synced(partial / _RUN, json.dumps(document, allow_nan=False).encode())
    for name, content in attachments.items():
        write_synced(partial / _ATTACHMENTS / name, content)
    sync(partial / _ATTACHMENTS)


def _hash_attachments(attachments: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in attachments.items()}


def _rename_with_suffix(checkpoint: Path, suffix: str) -> Path:
    renamed = checkpoint.with_name(checkpoint.name + suffix)
    checkpoint.rename(renamed)
    return renamed


def _describe_error(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    return str(error) or type(error).__name__


def export_weights(
    state: State,
    folder: Path,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    max_file_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights as transformers does: `model.safetensors`, or several files and an index. All ranks call it.

    No rank holds more than one file's weights beside its own part. Files are renamed when all of them are complete, and
    replace an earlier export. A file has at most `max_file_bytes`, unless a single tensor has more.
    """
    split = split_state_dict_into_shards_factory(
        dict(state),
        get_storage_size=lambda value: value.numel() * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        tensors = gather_state({name: state[name] for name in names}, keep=dist.get_rank() == 0, dtype=dtype)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        _run_on_first_rank(
            folder, group, save_file, tensors, folder / (file + _PARTIAL_SUFFIX), {"format": "pt"}
        )
    _run_on_first_rank(folder, group, _rename_files, folder, split)


def export_adapter(
    state: State, folder: Path, lora: LoraConfig, *, base: str, group: dist.ProcessGroup
) -> None:
    """Write adapters as PEFT stores them. All ranks call it."""
    factors = gather_state(state, keep=dist.get_rank() == 0)
    _run_on_first_rank(folder, group, lambda: write_adapter(folder, factors, lora, base=base))


def _run_on_first_rank(
    folder: Path, group: dist.ProcessGroup, work: Callable[..., None], *arguments: Any
) -> None:
    """Run `work` on rank 0, which may take longer than other collectives; a failure is raised on all ranks."""
    failure = None
    if dist.get_rank() == 0:
        try:
            work(*arguments)
        except Exception as error:
            failure = _describe_error(error)
            for partial in folder.glob(f"*{_PARTIAL_SUFFIX}"):
                partial.unlink()
    if (failure := agree(failure, group)) is not None:
        raise CheckpointError(f"cannot write the weights to {str(folder)!r}: {failure}")


def _rename_files(folder: Path, split: StateDictSplit) -> None:
    index = folder / INDEX
    for file in split.filename_to_tensors:
        sync(folder / (file + _PARTIAL_SUFFIX))
    index.unlink(missing_ok=True)  # it is invalid as soon as the first file is replaced
    for file in split.filename_to_tensors:
        (folder / (file + _PARTIAL_SUFFIX)).rename(folder / file)
    for file_path in folder.glob("model*.safetensors"):
        if file_path.name not in split.filename_to_tensors:
            file_path.unlink()
    if split.is_sharded:
        document = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_synced(index, json.dumps(document, indent=2).encode())
    sync(folder)
