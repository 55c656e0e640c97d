"""Periods: rounds of a stage between two whole exchanges, in which devices exchange single layers.

A period is ``length`` rounds of one stage, fewer at its end. Its devices receive the model in the first round, go on
from their own trained parts in the others, and upload everything trained in the last. In every round but the last they
upload the layers they are asked for, in every one but the first they receive layers in place of their own. It costs one
download and one upload of what is trained, and 2 (length - 1) times the layers. MMiC (arXiv 2505.06911) substitutes one
layer of each whole upload instead, which is a length of 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from edgefl.plan.job import RunPlan, Slot, Stage
from edgefl.plan.stages import is_closing
from edgefl.registry import Period, chosen

#: The largest layer that is exchanged alone, as a share of everything trained. A word table is a third of DistilBERT.
LARGEST_SHARE = 1 / 20
#: Of a value as it travels, and of what an object of one tensor holds beside its values, at most.
VALUE_BYTES, HEADER_BYTES = 4, 256


def period_of(repair: Slot) -> Period:
    """The period of a recipe's slot ``repair``."""
    slot = chosen("repair", repair)[0]
    return Period() if slot.method.period is None else slot.bind(slot.method.period)()


def period_length(plan: RunPlan, stage: Stage) -> int:
    """Rounds in a period of the stage; 1 (also for the closing round): each round exchanges everything."""
    return 1 if is_closing(stage) else period_of(plan.slots.repair).rounds


def ends(number: int, rounds: int, length: int) -> bool:
    """True if round ``number`` of a stage with ``rounds`` is the last of a period."""
    return number % length == 0 or number >= rounds


def whole_exchanges(rounds: int, length: int) -> int:
    """Number of whole uploads in a stage of ``rounds``; equals that of whole downloads."""
    return -(-rounds // length)


def exchangeable(shapes: Mapping[str, Mapping[str, Sequence[int]]], trained_bytes: int) -> dict[str, int]:
    """Layers ("part|tensor" -> largest bytes) for single exchange, in a stage with ``trained_bytes``.

    Weights of two dimensions or more, of ``shapes`` {part: {tensor: shape}}; without position tables, class tokens, and
    layers above ``LARGEST_SHARE``.
    """
    found = {
        f"{part}|{name}": VALUE_BYTES * prod(shape) + HEADER_BYTES
        for part, tensors in sorted(shapes.items())
        for name, shape in sorted(tensors.items())
        if len(shape) >= 2 and name.endswith("weight")
    }
    return {name: size for name, size in found.items() if size <= LARGEST_SHARE * trained_bytes}


def split(layer: str) -> tuple[str, str]:
    """(part, tensor) of a layer's name."""
    part, _, tensor = layer.partition("|")
    return part, tensor


def in_parts(layers: Iterable[str], parts: Iterable[str]) -> list[str]:
    """The layers ("part|tensor") in any of the parts."""
    among = set(parts)
    return [layer for layer in layers if split(layer)[0] in among]
