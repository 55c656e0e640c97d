"""Floating point operations of whatever runs inside, forward and backward: 2 per multiply-accumulate.

torch's FlopCounterMode, completed: on CPU it knows no formula for the fused attention kernel (3 to 8 % of a transformer
would be missing), and its formulas for the fused backward kernels count the recomputation of the scores. Here attention
counts the same whichever kernel runs it: 2 matrix products forward, 4 backward. So a prediction on the ``meta`` device
and a count on any real device agree. Counting costs about 20 % of a step: count once per shape.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgefl.records import Figure, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Operators of torch.ops.aten. Some appear only in newer versions or other builds.
_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


class FlopCounter:
    """Context manager; ``flops`` is the count so far. Needs torch, and works on meta tensors."""

    def __init__(self, formulas: Mapping[Any, Callable[..., int]] | None = None) -> None:
        """``formulas``: more of them, operator -> operations from the shapes of what it is given."""
        from torch.utils import flop_counter

        for mode in ("FlopCounterMode", "_FlopCounterMode"):  # newer versions dispatch in a mode of their own
            without_compiler(getattr(flop_counter, mode, None))
        self._mode = flop_counter.FlopCounterMode(display=False, custom_mapping={**_formulas(), **(formulas or {})})
        tracker: Any = _NoModules()  # torch's has hooks that keep alive what blocks computed anew
        self._mode.mod_tracker = tracker

    def __enter__(self) -> FlopCounter:
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # the same

    @property
    def flops(self) -> int:
        """Operations counted since entering."""
        return int(self._mode.get_total_flops())

    def figure(self, repeats: float = 1.0, kind: Kind = "counted") -> Figure:
        """The count times ``repeats`` (steps of the same shape) as a ledger figure."""
        return Figure(value=self.flops * repeats, kind=kind, source="torch FlopCounterMode, 2 per multiply-accumulate")


class _NoModules:
    """In place of torch's tracker of modules: everything is counted in one sum."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def without_compiler(mode: type | None) -> None:
    """Keep a dispatch mode from importing torch's compiler (torch._dynamo, sympy: 67 MiB) when it is first used.

    torch wraps ``__torch_dispatch__`` so that the compiler leaves it alone, and imports the compiler for that. The mark
    it would leave is set here instead. A torch without this wrapper, or with another, is left as it is.
    """
    wrapped = getattr(getattr(mode, "__torch_dispatch__", None), "__wrapped__", None)
    if wrapped is not None and not hasattr(wrapped, "__dynamo_disable"):
        setattr(wrapped, "__dynamo_disable", wrapped)


def _formulas() -> dict[Any, Callable[..., int]]:
    import torch

    formulas: dict[Any, Callable[..., int]] = {}
    for name in _FUSED:
        for operator, formula in ((name, _attention), (f"{name}_backward", _attention_backward)):
            packet = getattr(torch.ops.aten, operator, None)
            if packet is not None:
                formulas[packet] = formula
    return formulas


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object, **__: object) -> int:
    """q [B, H, S, d], k [B, G, T, d], v [B, G, T, e]: Q Kᵀ and (softmax) V. Causal masks count in full, as run."""
    batch, heads, length, width = q
    return 2 * batch * heads * length * k[2] * (width + v[3])


def _attention_backward(
    _gradient: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object, **__: object
) -> int:
    """Two products for each of the forward ones; scores that a kernel recomputes are not counted."""
    return 2 * _attention(q, k, v)
