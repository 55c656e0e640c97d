"""The staged model: its named parts as torch modules, and the way of a batch through them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.check import check_spec
from edgefl.models.encoder import Stage, TokenState, initialise, kind_of
from edgefl.models.heads import classifier, fusion, projection_head
from edgefl.models.spec import ModelSpec, modality_of, part_names


class StagedModel(nn.Module):
    """The parts of a model that exist, in the order of the specification. Made by :func:`build`.

    ``train()`` and ``eval()``, per part, are the caller's business. Using a part that was not built raises ModelError.
    """

    def __init__(self, spec: ModelSpec, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        self._kinds = {m: kind_of(e) for m, e in spec.encoders.items() if any(modality_of(p) == m for p in modules)}
        self._parts = nn.ModuleDict(dict(modules))

    @property
    def parts_present(self) -> tuple[str, ...]:
        """Names of the parts that exist, in order."""
        return tuple(self._parts)

    def part(self, name: str) -> nn.Module:
        """The part's module. Raises ModelError when it does not exist here."""
        if name not in self._parts:
            raise ModelError(
                f"the part '{name}' is not in this model, which holds {', '.join(self._parts) or 'nothing'}",
                remedy="Name the part when the model is built; edgefl.models.spec.part_names lists all of them.",
            )
        return self._parts[name]

    def embed(self, modality: str, x: Tensor) -> TokenState:
        """Input [B, *input_shape] -> tokens [B, N, D]; ModelError when a sample's shape is another."""
        embed = self.part(f"{modality}/embed")
        expected = tuple(self.spec.encoders[modality].input_shape)
        if tuple(x.shape[1:]) != expected:
            raise ModelError(
                f"modality '{modality}': samples of shape {list(x.shape[1:])}, but the model takes {list(expected)}",
                remedy=f"Set encoders.{modality}.input_shape to the data's shape, or window or resize the data.",
            )
        state: TokenState = embed(x)
        return state

    def stage(self, modality: str, k: int, state: TokenState) -> TokenState:
        """Tokens through stage ``k`` (counted from 1)."""
        after: TokenState = self.part(f"{modality}/stage{k}")(state)
        return after

    def pool(self, modality: str, state: TokenState) -> Tensor:
        """Final norm and pooling: tokens [B, N, D] -> h [B, D]."""
        return self._kinds[modality].pool(self.part(f"{modality}/norm")(state.tokens))

    def encode(self, modality: str, x: Tensor, depth: int | None = None) -> Tensor:
        """Input -> h [B, D] through stages 1..``depth`` (None: all the model has by its specification)."""
        state = self.embed(modality, x)
        for k in range(1, (self.spec.stages if depth is None else depth) + 1):
            state = self.stage(modality, k, state)
        return self.pool(modality, state)

    def project(self, modality: str, h: Tensor) -> Tensor:
        """h [B, D] -> r [B, head.out] through the modality's head."""
        projected: Tensor = self.part(f"head/{modality}")(h)
        return projected

    def fuse(self, projections: Mapping[str, Tensor]) -> Tensor:
        """Projections of every modality, each [B, head.out] -> f [B, fusion_width].

        A modality the sample lacks must be filled in by the caller; a modality left out raises ModelError.
        """
        module = self.part("fusion")
        if set(projections) != set(self.spec.encoders):
            raise ModelError(
                f"fusion needs the modalities {sorted(self.spec.encoders)}, but got {sorted(projections)}",
                remedy="Fill an absent modality with zeros or a prototype.",
            )
        fused: Tensor = module(torch.cat([projections[m] for m in self.spec.encoders], dim=1))
        return fused

    def classify(self, fused: Tensor) -> Tensor:
        """f [B, fusion_width] -> logits [B, classes]."""
        logits: Tensor = self.part("task")(fused)
        return logits


def build(
    spec: ModelSpec, parts: Sequence[str] | None = None, device: str | torch.device = "cpu", seed: int = 0
) -> StagedModel:
    """The named parts (None: all) with random first weights, on ``device`` ("meta": shapes only), in training mode.

    A part's weights depend on ``seed`` and its name alone: not on the other parts, not on the device, not on torch's
    global generator, which stays untouched. Pretrained weights are not loaded here but arrive as tensors
    (``edgefl.models.pretrained.initial_parts``). Raises ModelError for an unsound specification or an unknown part.
    """
    check_spec(spec)
    known = part_names(spec)
    wanted = known if parts is None else parts
    unknown = [part for part in wanted if part not in known]
    if unknown:
        raise ModelError(
            f"the model has no part {', '.join(repr(part) for part in unknown)}",
            remedy=f"Its parts are: {', '.join(known)}.",
        )
    chosen = set(wanted)
    place = torch.device(device)
    return StagedModel(spec, {part: _build_part(spec, part, place, seed) for part in known if part in chosen})


def _build_part(spec: ModelSpec, part: str, device: torch.device, seed: int) -> nn.Module:
    if device.type == "meta":
        with device:
            return _module(spec, part)
    # Always drawn on the CPU, so that every kind of device starts from the same numbers.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(_part_seed(seed, part))
        module = _module(spec, part)
        initialise(module)
    return module.to(device)


def _part_seed(seed: int, part: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{part}".encode()).digest()[:7], "big")


def _module(spec: ModelSpec, part: str) -> nn.Module:
    if part == "fusion":
        return fusion(spec)
    if part == "task":
        return classifier(spec)
    owner, _, rest = part.partition("/")
    if owner == "head":
        return projection_head(spec.encoders[rest].width, spec.head)
    encoder = spec.encoders[owner]
    kind = kind_of(encoder)
    if rest == "embed":
        return kind.embed(encoder)
    if rest == "norm":
        return kind.norm(encoder)
    return Stage(kind, encoder, encoder.depth // spec.stages)
