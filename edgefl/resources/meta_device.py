"""torch's meta device without torch's compiler."""

from __future__ import annotations

import gc
from functools import cache
from types import CodeType, FunctionType

import torch
from torch import _compile

#: Modules whose functions run on the meta device, beginnings of their names.
_KERNELS = ("torch._refs", "torch._prims", "torch._decomp", "torch._meta_registrations")


def meta_device() -> torch.device:
    """The meta device, whose kernels do not import the compiler."""
    _exclude_kernels()
    return torch.device("meta")


@cache
def _exclude_kernels() -> None:
    """Mark the kernels as excluded from compilation, as their first call does.

    That call imports torch._dynamo for it: 78 MiB and 1.1 s of a processor with torch 2.13. A release of torch that
    keeps the mark elsewhere imports it as before.
    """
    codes = getattr(getattr(_compile, "_disable_dynamo", None), "__code__", None)
    inside = [one for one in getattr(codes, "co_consts", ()) if isinstance(one, CodeType)]
    for function in gc.get_referrers(*inside) if inside else ():
        if isinstance(function, FunctionType) and function.__module__.startswith(_KERNELS):
            for cell in function.__closure__ or ():
                if isinstance(kernel := cell.cell_contents, FunctionType):
                    kernel.__dict__.setdefault("__dynamo_disable", kernel)
