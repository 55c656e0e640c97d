"""A device's upload: what the recipe's method sends of the parts that were trained, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from edgefl.errors import ModelError
from edgefl.models.spec import is_scheduled
from edgefl.plan.job import Job
from edgefl.registry import Choice, Trained, chosen

Tensors = dict[str, np.ndarray]


class Seen(NamedTuple):
    """Inputs of a device's round: the parts ``received``, those ``kept`` of its last round; ``losses`` by modalities.

    These are the trained model's on the samples that the device set apart.
    """

    received: Mapping[str, Tensors]
    kept: Mapping[str, Tensors]
    losses: Callable[[], Mapping[frozenset[str], float]] = dict


def uploaded(
    job: Job, sending: dict[str, Tensors], seen: Seen, rng: np.random.Generator
) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """(what is sent of ``sending``, what is kept for the method). What travels beside the model is as it was.

    Raises ModelError, naming the method, for parts that it was not given, of other tensors, or of more bytes than its
    ``most``.
    """
    upload = chosen("upload", job.slots.upload)[0]
    parts = {part: tensors for part, tensors in sending.items() if is_scheduled(part)}
    if upload.method.send is None or not parts:
        return sending, {}
    key = f"upload/{upload.name}"
    losses = seen.losses() if upload.method.returns else {}
    trained = Trained(parts, seen.received, losses, seen.kept.get(key, {}))
    made, noted = upload.bind(upload.method.send)(trained, rng)
    if why := _misfit(upload, made, parts):
        raise ModelError(f"upload: {upload.name} {why}", remedy="Mend the method's send, or set slots.upload: whole.")
    beside = {part: tensors for part, tensors in sending.items() if part not in parts}
    return {**made, **beside}, {key: noted} if noted else {}


def _misfit(upload: Choice, made: Mapping[str, Tensors], parts: Mapping[str, Tensors]) -> str:
    """Why these parts cannot be sent in place of those trained; "": they can."""
    if strange := sorted(made.keys() - parts.keys()):
        return f"sends parts that it was not given: {', '.join(strange)}"
    missing = sorted(parts.keys() - made.keys())
    if missing and not (upload.method.most and made):
        return f"leaves out {', '.join(missing)}; {'one part at least' if upload.method.most else 'all'} must be sent"
    for part, tensors in made.items():
        before, after = ({name: (t.dtype, t.shape) for name, t in each.items()} for each in (parts[part], tensors))
        if wrong := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            return f"changes the tensors of part {part}: {', '.join(wrong)}"
    if upload.method.most is None:
        return ""
    sizes = {part: sum(tensor.nbytes for tensor in tensors.values()) for part, tensors in parts.items()}
    count, most = sum(sizes[part] for part in made), upload.bind(upload.method.most)(sizes)
    return f"sends {count} bytes, and says that it sends {most} at most" if count > most else ""
