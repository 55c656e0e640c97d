"""torch, imported when first used: a method's file can be read by programs that have none.

The coordinator and ``edgefl plan`` read every method's options and rules; its functions on tensors run in the trainer
and in the evaluator, where torch is there. Decorators run at import, so ``with torch.no_grad():`` goes inside.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F  # noqa: N812 - the field's own name for it
    from torch import nn
else:

    class _Module:
        """A module that is imported when one of its attributes is first asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> object:
            value = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, value)
            return value

    torch = _Module("torch")
    nn = _Module("torch.nn")
    F = _Module("torch.nn.functional")

__all__ = ["F", "nn", "torch"]
