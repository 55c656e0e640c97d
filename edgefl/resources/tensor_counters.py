"""Floating point operations and live bytes of the tensor operations inside a context, on any device including meta.

A multiply-accumulate counts 2 operations. torch's FlopCounterMode is completed: on CPU it knows no formula for the
fused attention kernel (3 to 8 % of a transformer would be missing), and its formulas for the fused backward kernels
count the recomputation of the scores. Here attention counts the same whichever kernel runs it: 2 matrix products
forward, 4 backward. So a prediction on the ``meta`` device and a count on any real device agree. Counting costs about
20 % of a step: count once per shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode  # the documented extension point has no public alias
from torch.utils._pytree import tree_leaves

from edgefl.resources.heap import Event

#: Operators of torch.ops.aten. Some appear only in newer versions or other builds.
_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
#: An operator of torch.ops.aten -> operations, from the shapes of what it is given.
Formulas = Mapping[object, Callable[..., int]]


class FlopCounter:
    """Context manager; ``flops`` is the count so far. Works on meta tensors. ``formulas``: more of them."""

    def __init__(self, formulas: Formulas | None = None) -> None:
        for mode in ("FlopCounterMode", "_FlopCounterMode"):  # newer versions dispatch in a mode of their own
            _without_compiler(getattr(flop_counter, mode, None))
        self._mode = flop_counter.FlopCounterMode(display=False, custom_mapping={**_formulas(), **(formulas or {})})
        tracker: Any = _NoModules()  # torch's has hooks that keep alive what recomputed blocks hold
        self._mode.mod_tracker = tracker
        self._repeated = 0

    def __enter__(self) -> FlopCounter:
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._open = _OPEN.set((*_OPEN.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _OPEN.reset(self._open)
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # the same

    @property
    def flops(self) -> int:
        """Operations counted since entering."""
        return int(self._mode.get_total_flops()) + self._repeated

    def counted(self) -> tuple[int, ...]:
        """What ``repeat`` begins from."""
        return (self.flops,)

    def repeat(self, times: int, since: tuple[int, ...]) -> None:
        """Count what was done since ``since`` so many times more."""
        self._repeated += times * (self.flops - since[0])


#: The counters that are open in this context.
_OPEN: ContextVar[tuple[FlopCounter | LiveBytes, ...]] = ContextVar("_OPEN", default=())


@contextmanager
def standing_for(times: int) -> Iterator[None]:
    """Count FLOPs and operations inside as if they ran ``times`` times."""
    before = [(counter, counter.counted()) for counter in _OPEN.get()]
    yield
    for counter, counts in before:
        counter.repeat(times - 1, counts)


class _NoModules:
    """In place of torch's tracker of modules: everything is counted in one sum."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its base unannotated
    """``peak``: most bytes, at one time, of storages made inside the context. What was in use before is not counted.

    ``operations``: how many ran inside; ``written``: bytes of tensors that they made or changed. ``noted``: what
    ``note``, as it was set then, said at that moment.
    ``events``: storages as they came and went, numbered from 1.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        _without_compiler(type(self))
        self.live = 0
        self.peak = 0
        self.note: Callable[[], int] = lambda: 0
        self.noted = 0
        self.operations = self.written = 0
        self.events: list[Event] = []
        self._made = 0
        self._seen: dict[int, int] = {}

    def __enter__(self) -> LiveBytes:
        self._open = _OPEN.set((*_OPEN.get(), self))
        super().__enter__()  # type: ignore[no-untyped-call]  # the same
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # the same
        _OPEN.reset(self._open)

    def counted(self) -> tuple[int, ...]:
        """What ``repeat`` begins from."""
        return self.operations, self.written

    def repeat(self, times: int, since: tuple[int, ...]) -> None:
        """Count what was done since ``since`` so many times more."""
        self.operations += times * (self.operations - since[0])
        self.written += times * (self.written - since[1])

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        given = {_identity(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        self.operations += 1
        self.written += sum(one.nbytes for one in _changed(func, args, kwargs or {}))
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
        self._made += 1
        self._seen[key] = self._made
        self.events.append((self._made, size))
        self.live += size
        self.written += size
        if self.live > self.peak:
            self.peak, self.noted = self.live, self.note()
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.events.append((-self._seen.pop(key), size))
        self.live -= size


def _changed(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> list[torch.Tensor]:
    """Tensors that an operation changes in place."""
    if not func._schema.is_mutable:  # noqa: SLF001 - torch's own counters read it as well
        return []
    given = zip(func._schema.arguments, args, strict=False)  # noqa: SLF001 - the same
    written = [value for one, value in given if one.is_write]
    written += [value for name, value in kwargs.items() if name == "out"]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the same


def _without_compiler(mode: type | None) -> None:
    """Keep a dispatch mode from importing torch's compiler (torch._dynamo, sympy: 67 MiB) when it is first used.

    torch wraps ``__torch_dispatch__`` so that the compiler leaves it alone, and imports the compiler for that. The mark
    it would leave is set here instead. A torch without this wrapper, or with another, is left as it is.
    """
    wrapped = getattr(getattr(mode, "__torch_dispatch__", None), "__wrapped__", None)
    if wrapped is not None and not hasattr(wrapped, "__dynamo_disable"):
        setattr(wrapped, "__dynamo_disable", wrapped)


def _formulas() -> dict[object, Callable[..., int]]:
    formulas: dict[object, Callable[..., int]] = {}
    for name in _FUSED:
        for operator, formula in ((name, _attention), (f"{name}_backward", _attention_backward)):
            packet = getattr(torch.ops.aten, operator, None)
            if packet is not None:
                formulas[packet] = formula
    formulas[torch.ops.aten.addmm_] = _added_product  # torch counts what makes a new tensor alone
    return formulas


def _added_product(_: Sequence[int], a: Sequence[int], b: Sequence[int], **__: object) -> int:
    """a [m, k], b [k, n], whose product is added to a tensor in place."""
    return 2 * a[0] * a[1] * b[1]


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object, **__: object) -> int:
    """q [B, H, S, d], k [B, G, T, d], v [B, G, T, e]: Q Kᵀ and (softmax) V. Causal masks count in full, as run."""
    batch, heads, length, width = q
    return 2 * batch * heads * length * k[2] * (width + v[3])


def _attention_backward(
    _gradient: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object, **__: object
) -> int:
    """Two products for each of the forward ones; scores that a kernel recomputes are not counted."""
    return 2 * _attention(q, k, v)
