"""Encoder fields from a checkpoint's own config.json.

Read as JSON, without `transformers`, from local folders only: a checkpoint named on a hub is unknown before it is
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from edgefl import encoder_families as families
from edgefl.config.encoder import EncoderConfig
from edgefl.config.settings import RunConfig
from edgefl.errors import Problem
from edgefl.storage.checkpoint_paths import is_own, local_folder
from edgefl.storage.disk import read_at_most

#: A configuration has some kilobytes; with 20,000 labels, a megabyte.
_MAX_FILE_BYTES = 8 * 2**20
_COMPARED = ("width", "depth", "heads", "mlp_ratio", "patch", "stride", "vocabulary", "arch")
_NEEDED = ("width", "depth", "heads")


class Told(NamedTuple):
    """``EncoderSpec`` fields of a checkpoint. ``longest``: text's tokens, 0: any; ``problem``: reason to refuse it."""

    fields: dict[str, Any]
    longest: int = 0
    problem: str = ""


def told(encoder: EncoderConfig) -> Told:
    """Fields from the folder named by ``pretrained``; none for other names.

    Raises ModelError for a missing folder.
    """
    if not encoder.pretrained or is_own(encoder.pretrained):
        return Told({})
    folder = local_folder(encoder.pretrained)
    if folder is None:
        return Told({})
    config = _json(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return Told({}, problem=f"{folder / 'config.json'} is missing, or names no model_type")
    if why := _refused(model_type, encoder.kind):
        return Told({}, problem=f"{encoder.pretrained!r} {why}")
    return _described(encoder, folder, config, model_type)


def _described(encoder: EncoderConfig, folder: Path, config: dict[str, Any], model_type: str) -> Told:
    ours = model_type in families.OWN_BLOCKS
    tower = config if ours else families.tower_of(config, encoder.kind)
    try:
        fields = families.fields(tower, encoder.kind)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return Told({}, problem=f"{folder / 'config.json'} cannot be used: {error!r}")
    if not ours and (lacking := [name for name in _NEEDED if not isinstance(fields.get(name), int)]):
        return Told({}, problem=f"{folder / 'config.json'} does not say its {', '.join(lacking)}")
    if not ours:
        pixels = _pixels(folder, model_type) if encoder.kind == "vision" else None
        fields["config"] = families.travelling(tower, pixels)
        if len(fields["config"].encode()) > families.MAX_CONFIG_BYTES:
            return Told({}, problem=f"{folder / 'config.json'} has more than {families.MAX_CONFIG_BYTES} bytes")
        fields["pool"] = families.family_of(model_type, encoder.kind).pool
    if pool := _pool(folder):
        fields["pool"] = pool
    return Told(fields, families.longest(tower) if encoder.kind == "text" else 0)


def checkpoint_problems(config: RunConfig) -> list[Problem]:
    """Problems of a run file's checkpoints: unsupported ones, and contradicting encoder fields.

    Raises ModelError for a folder that is not there.
    """
    found = []
    for modality, encoder in config.model.encoders.items():
        path = f"model.encoders.{modality}"
        says = told(encoder)
        if says.problem:
            found.append(Problem(f"{path}.pretrained", says.problem))
        elif differences := list(_differences(encoder, says)):
            own = ", ".join(f"{name} {mine}" for name, mine, _ in differences)
            lines = "".join(f"\n      {name}: {theirs}" for name, _, theirs in differences)
            text = f"{own} contradict {encoder.pretrained!r}; leave them out, or set{lines}"
            found.append(Problem(path, text.replace("contradict", "contradicts", len(differences) == 1)))
    return found


def _differences(encoder: EncoderConfig, says: Told) -> Iterator[tuple[str, object, object]]:
    """(field, run file's value, checkpoint's value) of contradictions."""
    for name in _COMPARED:
        mine, theirs = getattr(encoder, name), says.fields.get(name)
        if mine is not None and theirs is not None and mine != theirs and not _as_wide(name, mine, theirs):
            yield name, mine, theirs
    if encoder.positions and says.longest and encoder.positions > says.longest:
        yield "positions", encoder.positions, says.longest
    shape = says.fields.get("input_shape", ())
    if encoder.kind == "vision" and encoder.image_size is not None and shape:
        sides = encoder.image_size if isinstance(encoder.image_size, list) else [encoder.image_size] * 2
        if sides != list(shape[:2]):
            yield "image_size", encoder.image_size, shape[0] if shape[0] == shape[1] else list(shape[:2])
    if encoder.bands is not None and shape and encoder.bands != shape[1]:
        yield "bands", encoder.bands, shape[1]
    if encoder.length is not None and 0 < says.longest < encoder.length:
        yield "length", encoder.length, says.longest


def _as_wide(name: str, mine: object, theirs: object) -> bool:
    return name == "mlp_ratio" and isinstance(mine, float) and isinstance(theirs, float) and abs(mine - theirs) < 1e-6


def _refused(model_type: str, kind: str) -> str:
    """Reason to refuse a model family for an encoder kind; "" for none."""
    listed = ", ".join(families.taken(kind)) or "no family"
    if model_type in families.REFUSED:
        return f"is a {model_type!r}, and {families.REFUSED[model_type]}; taken for {kind}: {listed}"
    other = families.OWN_BLOCKS.get(model_type, ("",))[0] or getattr(families.FAMILIES.get(model_type), "kind", kind)
    return "" if other == kind else f"is a {model_type!r}, which is of kind {other}; taken for {kind}: {listed}"


def _pixels(folder: Path, model_type: str) -> list[list[float]]:
    """Mean and deviation of 0..1 pixels expected by the checkpoint."""
    settings = _json(folder / "preprocessor_config.json")
    usual = families.family_of(model_type, "vision").pixels
    if settings.get("do_normalize") is False:
        return [[0.0], [1.0]]
    return [
        list(value) if isinstance(value, list | tuple) else [float(value)]
        for value in (settings.get("image_mean", usual[0]), settings.get("image_std", usual[1]))
    ]


def _pool(folder: Path) -> str:
    """Pooling of a sentence-transformers checkpoint; "" for none."""
    pooling = _json(folder / "1_Pooling" / "config.json")
    if pooling.get("pooling_mode_mean_tokens"):
        return "mean"
    return "token" if pooling.get("pooling_mode_cls_token") else ""


def _json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} for a missing or invalid file."""
    try:
        values = json.loads(read_at_most(path, _MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
