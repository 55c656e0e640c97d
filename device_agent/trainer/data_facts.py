"""Facts on a device's data for its hello: as found, and as read by a run's preparation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from device_agent.core.state import DataFacts
from edgefl.data.dataset import Dataset
from edgefl.data.moments import moments_of
from edgefl.errors import EdgeFLError
from edgefl.models.spec import EncoderSpec
from edgefl.plan.job import Preparation
from edgefl.protocol.tensors import encode_part
from edgefl.registry import signature


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """Fields of ``DataFacts`` known from the data alone."""
    return {
        "modalities": {m: () if m in dataset.resizable else shape for m, shape in dataset.signature().items()},
        "samples": dataset.samples(),
        "class_counts": dataset.class_counts(),
        "label_names": tuple(dataset.label_names),
        "skipped": len(dataset.skipped),
    }


def described(
    base: DataFacts, preparation: Preparation, read: Callable[[Mapping[str, EncoderSpec]], Dataset]
) -> DataFacts:
    """``base`` with facts on the data by ``read``; for unreadable data only the reason (``problem``)."""
    if not preparation.id:
        return base
    here = {m: spec for m, spec in preparation.encoders.items() if m in base.modalities}
    try:
        data = read(here)
        moments = moments_of(data, here, preparation.least)
        signature = _signed(data, preparation)
    except EdgeFLError as error:
        none: dict[str, Any] = {"modalities": {}, "samples": {"": 0}, "class_counts": (), "problem": error.message}
        return replace(base, prepared=preparation.id, **none)
    return replace(base, **data_facts(data), prepared=preparation.id, moments=moments, signature=signature)


def _signed(data: Dataset, preparation: Preparation) -> bytes:
    """The data's signature for clustering by the preparation, encoded; b"" without samples."""
    if not preparation.signature or not len(data):
        return b""
    return encode_part(signature(preparation.signature).sign(data, preparation.classes, preparation.seed))
