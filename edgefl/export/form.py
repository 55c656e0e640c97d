"""User's choice of an export's form: precisions, tables, operator set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from edgefl.errors import ExportError
from edgefl.export.precision_record import EXACT, Precision

#: Where prototype tables are: inputs that every call must give, their values beside the file; inputs that a call may
#: give; or in the file for good.
Tables = Literal["required", "optional", "fixed"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: ONNX operator sets a bundle can be written in. 17 has all that our own models use and is read by every runtime tried
#: (docs/export.md); what torch writes is 18; 20 has Gelu as one operator.
OPSETS = (17, 18, 20)


@dataclass(frozen=True)
class Form:
    """Form of an export: precisions, prototype tables, opset.

    ``max_loss``: percentage points that a lower precision may cost any subset of the modalities.
    """

    precisions: tuple[Precision, ...] = (EXACT,)
    max_loss: float = 1.0
    tables: Tables = "required"
    opset: int = OPSETS[0]


#: The form of an export that says nothing else.
PLAIN = Form()


def precisions_of(names: Iterable[str]) -> tuple[Precision, ...]:
    """The precisions of these names, each once. Raises ExportError for an unknown one."""
    wanted = list(dict.fromkeys(names))
    if unknown := [name for name in wanted if name not in PRECISIONS]:
        raise ExportError(f"unknown precision {', '.join(unknown)}", remedy=f"Choose among {', '.join(PRECISIONS)}.")
    return tuple(one for name in wanted for one in PRECISIONS if one == name)
