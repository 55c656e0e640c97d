"""Peak of live tensor bytes while operations run, on any device including meta: a prediction of memory before a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # the documented extension point has no public alias
from torch.utils._pytree import tree_leaves

from edgefl.resources.flops import without_compiler


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its base unannotated
    """``peak``: most bytes, at one time, of storages made inside the context. What was in use before is not counted.

    ``operations``: how many ran inside. ``noted``: what ``note``, as it was set then, said at that moment.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        without_compiler(type(self))
        self.live = 0
        self.peak = 0
        self.note: Callable[[], int] = lambda: 0
        self.noted = 0
        self.operations = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_identity(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        self.operations += 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _identity(leaf) not in given:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # noqa: SLF001 - the only identity a storage has
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.live += size
        if self.live > self.peak:
            self.peak, self.noted = self.live, self.note()
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the same
