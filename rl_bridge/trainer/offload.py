"""Tensors that leave a device's memory to others for a while, and come back to where everybody knows them."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Offload:
    """Copies in the host's memory, page-locked for a GPU, of tensors whose own memory is given back.

    The tensors stay who they are, and so do views of them: optimizer, FSDP and state dicts need not know. In between
    nothing may be read of them. The copies' memory is kept from one time to the next.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._away: dict[int, torch.UntypedStorage] = {}

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Copy them away, and give their memory back; nothing where that is done."""
        if self._away:
            return
        storages = {}
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            storages[local.untyped_storage()._cdata] = local.untyped_storage()
        for key, storage in storages.items():
            kept = self._kept.get(key)
            if kept is None or len(kept) != storage.nbytes():
                on_gpu = storage.device.type == "cuda"
                kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            self._kept[key] = kept
            kept.copy_(_bytes_of(storage))
            storage.resize_(0)
        self._away = storages
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Put back what is away; nothing where it is."""
        for key, storage in list(self._away.items()):
            kept = self._kept[key]
            storage.resize_(len(kept))
            _bytes_of(storage).copy_(kept)
            del self._away[key]  # not before: whoever runs out of memory here may come again


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
