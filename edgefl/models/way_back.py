"""A trained encoder as a checkpoint of `transformers`: the one it began with, its tensors replaced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from edgefl.errors import ModelError
from edgefl.models.checkpoints import Source, split_modules
from edgefl.models.low_rank import merged
from edgefl.models.parts import named_tensors
from edgefl.models.published import PIXEL_DEVIATION, PIXEL_MEAN
from edgefl.models.spec import ModelSpec
from edgefl.storage.checkpoint_paths import is_own

Modules = Mapping[str, Mapping[str, nn.Module]]


def write_checkpoint(
    spec: ModelSpec, modality: str, parts: Mapping[str, Mapping[str, np.ndarray]], folder: Path
) -> None:
    """Write the encoder of a modality to ``folder``, for the library's `AutoModel.from_pretrained`.

    Low-rank terms are in its weights.
    Raises ModelError where it began with no checkpoint of the library, or with one that is not there any more.
    """
    encoder = spec.encoders[modality]
    if not encoder.pretrained or is_own(encoder.pretrained):
        raise ModelError(
            f"the encoder of '{modality}' did not begin with a checkpoint of transformers",
            remedy="Export it as ONNX, or name a checkpoint in `pretrained` and train again.",
        )
    source = Source(modality, encoder)
    module = source.load()
    targets = _library_modules(spec, modality, module) if encoder.config else split_modules(spec, modality, module)
    trained = merged(parts, spec.lora)
    for part, modules in targets.items():
        _replace(part, modules, trained.get(part, {}))
    source.whole.save_pretrained(folder)
    if encoder.kind == "vision" and not encoder.config:  # whose projection was made for our scale of pixels
        scale = {"do_normalize": True, "image_mean": [PIXEL_MEAN] * 3, "image_std": [PIXEL_DEVIATION] * 3}
        own = Path(source.name) / "preprocessor_config.json"
        settings = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else {}
        (folder / own.name).write_text(json.dumps({**settings, **scale}, indent=2), encoding="utf-8")


def _library_modules(spec: ModelSpec, modality: str, module: nn.Module) -> Modules:
    """{part: {prefix of its tensor names: module}} of an encoder that runs the library's own modules."""
    from edgefl.models.adapter import blocks_of, cut_of, norm_of

    encoder = spec.encoders[modality]
    cut = cut_of(encoder)
    blocks, per_stage = blocks_of(module, cut), encoder.depth // spec.stages
    found: dict[str, dict[str, nn.Module]] = {f"{modality}/embed": {"model.": module}}
    for k in range(spec.stages):
        mine = blocks[k * per_stage : (k + 1) * per_stage]
        found[f"{modality}/stage{k + 1}"] = {f"blocks.{i}.": block for i, block in enumerate(mine)}
    return {**found, f"{modality}/norm": {"": norm_of(module, cut)}}


def _replace(part: str, modules: Mapping[str, nn.Module], tensors: Mapping[str, np.ndarray]) -> None:
    """Copy a part's tensors into the modules; a table of which a part was taken keeps its other rows."""
    left = dict(tensors)
    for prefix, module in modules.items():
        for name, target in named_tensors(module).items():
            if (value := left.pop(f"{prefix}{name}", None)) is not None:
                with torch.no_grad():
                    target[: len(value)].copy_(torch.tensor(value)) if value.ndim else target.fill_(value.item())
    if left:
        raise ModelError(f"{part}: the checkpoint has no tensor '{min(left)}'")
