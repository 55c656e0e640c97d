"""The staged model: its named parts as torch modules, and the way of a batch through them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from edgefl.encoder_kinds import kind_of
from edgefl.errors import ModelError
from edgefl.models.check import check_spec
from edgefl.models.encoder import Input, Stage, TokenState, initialise, mean_token, rows_in, rows_of
from edgefl.models.heads import classifier, fusion, matcher, modality_head, reconstruction, stand_in
from edgefl.models.joint_fusion import Given, JointFusion
from edgefl.models.low_rank import LowRankPart, check_maps, chosen_maps, linear_maps, map_name
from edgefl.models.multiway import (
    FeedForward,
    Index,
    MultiwayStage,
    Rows,
    SharedAttention,
    merged,
    merged_states,
    patterns,
    run_stage,
)
from edgefl.models.spec import (
    ModelSpec,
    adapted_part,
    fused_width,
    fuses_tokens,
    is_encoder,
    is_lora,
    is_task,
    lora_part,
    lora_parts,
    modality_of,
    part_names,
    rank_start,
    shares_attention,
    shares_projection,
    task_parts,
)
from edgefl.registry import method
from edgefl.resources.meta_device import meta_device


class StagedModel(nn.Module):
    """The parts of a model that exist, in the order of the specification. Made by :func:`build`.

    ``train()`` and ``eval()``, per part, are the caller's business. Using a part that was not built raises ModelError.
    """

    def __init__(self, spec: ModelSpec, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        own = {modality_of(part) for part in modules if is_encoder(part)}
        self._kinds = {m: kind_of(e).build() for m, e in spec.encoders.items() if m in own}
        self._multiway = shares_attention(spec)
        self._shared = shares_projection(spec)
        self._tasks = [part for part in task_parts(spec) if part in modules] or ["task"]
        self._parts = nn.ModuleDict(dict(modules))
        self._named = dict(modules)  # the same: torch takes microseconds to look a module up
        weightless = spec.classes and not method("fusion", spec.fusion).weights
        self._weightless = fusion(spec) if weightless else None  # no part: there is nothing to train or send
        for part in modules:
            for adapter in lora_parts(spec, [part]):
                if isinstance(terms := modules.get(adapter), LowRankPart):
                    terms.attach(modules[part])

    @property
    def parts_present(self) -> tuple[str, ...]:
        """Names of the parts that exist, in order."""
        return tuple(self._parts)

    def part(self, name: str) -> nn.Module:
        """The part's module. Raises ModelError when it does not exist here."""
        if name not in self._named:
            raise ModelError(
                f"the part '{name}' is not in this model, which holds {', '.join(self._parts) or 'nothing'}",
                remedy="Name the part when the model is built; edgefl.models.spec.part_names lists all of them.",
            )
        return self._named[name]

    def embed(self, modality: str, x: Input) -> TokenState:
        """Input [B, *input_shape] -> tokens [B, N, D]; ModelError when a sample's shape is another.

        Tokens that stand for the input are taken as they are, in f32.
        """
        if isinstance(x, TokenState):
            return x._replace(tokens=x.tokens.float())
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
        """Tokens through stage ``k`` (counted from 1), this modality alone."""
        return self.run_stage(k, {modality: state})[modality]

    def run_stage(self, k: int, states: Mapping[str, TokenState]) -> dict[str, TokenState]:
        """Tokens through stage ``k``: rows that all have these modalities, in the same order."""
        parts = {m: self.part(f"{m}/stage{k}") for m in states}
        if self._multiway:
            own = cast("dict[str, MultiwayStage]", parts)
            return run_stage(cast("MultiwayStage", self.part(f"shared/stage{k}")), own, states)
        return {m: part(states[m]) for m, part in parts.items()}

    def norm(self, modality: str, state: TokenState) -> TokenState:
        """The final norm of every token."""
        return TokenState(self.part(f"{modality}/norm")(state.tokens), state.mask)

    def pool(self, modality: str, state: TokenState) -> Tensor:
        """Final norm and pooling: tokens [B, N, D] -> h [B, D]."""
        return self.pool_tokens(modality, self.norm(modality, state))

    def pool_tokens(self, modality: str, state: TokenState) -> Tensor:
        """Tokens after the final norm, as ``encode_tokens`` gives them, [B, N, D] -> h [B, D]."""
        if self.spec.encoders[modality].pool == "mean":
            return mean_token(state.tokens, state.mask)
        return self._kinds[modality].pool(state.tokens)

    def encode(self, modality: str, x: Input, depth: int | None = None) -> Tensor:
        """Input -> h [B, D] through stages 1..``depth`` (None: all the model has), this modality alone."""
        last = self.spec.stages if depth is None else depth
        if self._multiway or last < 1 or self.spec.encoders[modality].pool == "mean":
            return self.pool_tokens(modality, self.encode_tokens(modality, x, depth))
        state = self._through(modality, x, last - 1)
        if state.depth < last:
            pooled = kind_of(self.spec.encoders[modality]).pooled
            state = cast("Stage", self.part(f"{modality}/stage{last}"))(state, pooled)
        return self.pool(modality, state)

    def encode_tokens(self, modality: str, x: Input, depth: int | None = None) -> TokenState:
        """Input -> tokens [B, N, D] after the final norm, this modality alone, and for text which are real."""
        return self._encode_rows({modality: x}, depth)[modality]

    def _encode_rows(self, inputs: Mapping[str, Input], depth: int | None) -> dict[str, TokenState]:
        """Rows that all have these modalities, in the same order, after the final norm."""
        last = self.spec.stages if depth is None else depth
        if self._multiway:
            states = {m: self.embed(m, x) for m, x in inputs.items()}
            for k in range(1, last + 1):
                states = self.run_stage(k, states)
        else:
            states = {m: self._through(m, x, last) for m, x in inputs.items()}
        return {m: self.norm(m, state) for m, state in states.items()}

    def _through(self, modality: str, x: Input, last: int) -> TokenState:
        """One modality's tokens after stage ``last``, from where the input is."""
        state = self.embed(modality, x)
        for k in range(state.depth + 1, last + 1):
            state = self.stage(modality, k, state)
        return state

    def encode_batch(
        self, inputs: Mapping[str, Input], rows: Rows, size: int, depth: int | None = None
    ) -> dict[str, Tensor]:
        """Encoder embeddings h [n_m, D] of a batch, by modality.

        ``inputs[m]``: [n_m, …]; ``rows[m]`` [n_m]: their rows among the batch's ``size``, None: all. ``depth``: number
        of encoder stages, None: all. Multiway encoders share attention over a row's modalities; others ignore ``rows``.
        """
        if not self._multiway or len(inputs) < 2:
            return {m: self.encode(m, x, depth) for m, x in inputs.items()}
        found = self._by_pattern(inputs, rows, size, depth)
        return merged(inputs, ((index, {m: self.pool_tokens(m, s) for m, s in some.items()}) for index, some in found))

    def encode_batch_tokens(
        self, inputs: Mapping[str, Input], rows: Rows, size: int, depth: int | None = None
    ) -> dict[str, TokenState]:
        """``encode_batch`` before pooling: tokens [n_m, N, D] after the final norm, and for text which are real."""
        if not self._multiway or len(inputs) < 2:
            return {m: self.encode_tokens(m, x, depth) for m, x in inputs.items()}
        return merged_states(inputs, self._by_pattern(inputs, rows, size, depth))

    def _by_pattern(
        self, inputs: Mapping[str, Input], rows: Rows, size: int, depth: int | None
    ) -> Iterator[tuple[dict[str, Index], dict[str, TokenState]]]:
        # Rows of equal modalities together, not one padded pass: padding would hold activations for tokens that no
        # row has, in every layer, and compute them; a complete batch is one pattern and costs the same either way.
        for index in patterns({m: rows_in(x) for m, x in inputs.items()}, rows, size).values():
            yield index, self._encode_rows({m: rows_of(inputs[m], own) for m, own in index.items()}, depth)

    def project(self, modality: str, h: Tensor) -> Tensor:
        """h [B, D] -> r [B, head.out] through the modality's head and, if there is one, the shared projection."""
        projected: Tensor = self.part(f"head/{modality}")(h)
        return cast("JointFusion", self.part("fusion")).embed(projected) if self._shared else projected

    def fuse(
        self,
        projections: Mapping[str, Tensor],
        has: Mapping[str, Tensor] | None = None,
        tokens: Mapping[str, TokenState] | None = None,
        rows: Rows | None = None,
        counted: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Projections, each [B, head.out] -> f [B, fused_width]; ``has[m]`` [B]: which rows have m, None: all.

        Every modality is filled in by the caller, and ``counted[m]`` [B] says where with more than zeros, stand-ins
        included; without it, that is what ``has`` says.
        Of tokens: ``tokens[m]`` [n_m, N, D] as ``encode_batch_tokens`` gives them, of the rows ``rows[m]`` [n_m]
        (None: all); a row without a modality's tokens, or whose ``has`` denies it, uses its projection. A modality that
        no row has is left out of ``tokens``.
        Raises ModelError for a modality left out, and for a result of another width than the classifier takes.
        """
        names = list(self.spec.encoders)
        if set(projections) != set(names):
            raise ModelError(
                f"fusion needs the modalities {sorted(names)}, but got {sorted(projections)}",
                remedy="Fill an absent modality with zeros or a prototype.",
            )
        module = self.part("fusion") if self._weightless is None else self._weightless
        fused: Tensor
        if fuses_tokens(self.spec):
            fused = module(self._given(projections, has or {}, tokens, rows or {}))
        else:
            counted = has if counted is None else counted
            fused = module([projections[m] for m in names], [counted[m] for m in names] if counted else None)
        if fused.shape[1:] != (fused_width(self.spec),):
            raise ModelError(
                f"fusion {self.spec.fusion} makes {list(fused.shape)}, and [batch, {fused_width(self.spec)}] is taken",
                remedy="A fusion is as wide as a projection, or with wide=True as model.fusion_width.",
            )
        return fused

    def _given(
        self,
        projections: Mapping[str, Tensor],
        has: Mapping[str, Tensor],
        tokens: Mapping[str, TokenState] | None,
        rows: Rows,
    ) -> list[Given]:
        """Inputs of a fusion of tokens. Raises ModelError where there are none."""
        if tokens is None:
            raise ModelError(
                f"{self.spec.fusion} fusion needs the tokens of the modalities, not their projections alone",
                remedy="Pass tokens= from StagedModel.encode_batch_tokens.",
            )
        return [Given(projections[m], tokens.get(m), rows.get(m), has.get(m)) for m in self.spec.encoders]

    def reconstruct(self, modality: str, given: Tensor) -> Tensor:
        """Mean of the other modalities' projections shown (``heads.mean_of_shown``) [B, d] -> r of this one [B, d]."""
        made: Tensor = self.part(f"reconstruct/{modality}")(given)
        return made

    def match(self, modality: str, r: Tensor, absent: str = "") -> Tensor:
        """r [B, d] -> logits [B, classes] of the modality's small classifier, or its prior's [B, d] in the space of
        ``absent``. Raises ModelError when there is no such prior.
        """
        matcher = self.part(f"match/{modality}")
        if isinstance(matcher, nn.ModuleDict):
            if f"to/{absent}" not in matcher:
                raise ModelError(f"the part 'match/{modality}' has no prior to '{absent}'")
            matcher = matcher[f"to/{absent}"]
        made: Tensor = matcher(r)
        return made

    def classify(self, fused: Tensor) -> Tensor:
        """f [B, fused_width] -> logits [B, classes].

        Those of label sets without a classifier here are the lowest finite number.
        """
        found: dict[str, Tensor] = {part: self.part(part)(fused) for part in self._tasks}
        if len(task_parts(self.spec)) == 1:
            return next(iter(found.values()))
        logits = fused.new_full((len(fused), self.spec.classes), torch.finfo(fused.dtype).min)
        for part, own in found.items():
            places = torch.tensor(task_parts(self.spec)[part], device=fused.device)
            logits = logits.index_copy(1, places, own)
        return logits


def build(
    spec: ModelSpec,
    parts: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    settle: Callable[[nn.Module], None] | None = None,
) -> StagedModel:
    """The named parts (None: all) with random first weights, on ``device`` ("meta": shapes only), in training mode.

    A part's weights depend on ``seed`` and its name alone: not on the other parts, not on the device, not on torch's
    global generator, which stays untouched. Pretrained weights are not loaded here but arrive as tensors
    (``edgefl.models.checkpoints.initial_parts``). ``settle`` is called for each part before the next one is made.
    Raises ModelError for an unsound specification or an unknown part.
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
    modules = {}
    for part in filter(chosen.__contains__, known):
        modules[part] = _build_part(spec, part, place, seed)
        if settle is not None:
            settle(modules[part])
    return StagedModel(spec, modules)


def _build_part(spec: ModelSpec, part: str, device: torch.device, seed: int) -> nn.Module:
    if device.type == "meta":
        with meta_device():
            return _module(spec, part)
    # Always drawn on the CPU, so that every kind of device starts from the same numbers; slices of one term alike.
    name = lora_part(adapted_part(part)) if is_lora(part) else part
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(
            int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
        )
        module = _module(spec, part)
        initialise(module)
    return module.to(device)


#: Part, or the first word of its name -> how it is made of the specification and the rest of its name.
_MODULES: dict[str, Callable[[ModelSpec, str], nn.Module]] = {
    "fusion": lambda spec, _: fusion(spec),
    "missing": lambda spec, _: stand_in(spec),
    "head": modality_head,
    "reconstruct": lambda spec, _: reconstruction(spec),
    "match": matcher,
}


def check_lora(spec: ModelSpec) -> None:
    """Check the patterns of low-rank adaptation on the model's shapes. Raises ModelError."""
    if spec.lora is not msgspec.UNSET:
        check_maps(
            {part: list(map(map_name, linear_maps(_on_meta(spec, part)))) for part in spec.lora.parts}, spec.lora
        )


def _on_meta(spec: ModelSpec, part: str) -> nn.Module:
    with meta_device():
        return _module(spec, part)


def _module(spec: ModelSpec, part: str) -> nn.Module:
    if is_lora(part) and spec.lora is not msgspec.UNSET:
        return LowRankPart(chosen_maps(_on_meta(spec, adapted_part(part)), spec.lora), spec.lora, rank_start(part))
    if is_task(part):
        return classifier(spec, part)
    owner, _, rest = part.partition("/")
    if owner in _MODULES:
        return _MODULES[owner](spec, rest)
    multiway = shares_attention(spec)
    # check_spec has seen to it that what the shared attention is made of is the same for all encoders.
    encoder = next(iter(spec.encoders.values())) if owner == "shared" else spec.encoders[owner]
    count = encoder.depth // spec.stages
    if owner == "shared":
        return MultiwayStage(SharedAttention, encoder, count)
    kind = kind_of(encoder).build()
    if rest == "embed":
        return kind.embed(encoder)
    if rest == "norm":
        # Multiway layers are pre-norm for every kind, so text, whose own blocks are not, has a final norm here too.
        return nn.LayerNorm(encoder.width) if multiway else kind.norm(encoder)
    if multiway:
        return MultiwayStage(FeedForward, encoder, count)
    last = int(rest.removeprefix("stage")) * count
    return Stage(kind, encoder, range(last - count, last))
