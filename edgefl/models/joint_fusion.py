"""Joint fusion of token sequences (FedMVP, arXiv 2406.11048, section 3.3, eqs 2-3).

t_m <- W_m x_m + position;  t_m <- t_m + attention(Q = t_m, K = V = the others' t), all modalities at once;
t = [t_1; …; t_M] along the features, pooled to the shortest; of other than two modalities t <- U t, 2 x width wide;
3 self-attention layers;  X^joint = f(A mean over tokens of t),  X^m = f(A_m h_m),  f(h) = (W h + b) / ||W h + b||.

f is one projection for all. h_m is the encoder's output for a sample; A_m is there only for encoders narrower than the
widest one. Every modality adds the same number of parameters; the self-attention is as wide as for two
(docs/decisions/0030). Without ``JointSpec.shared``: t stays M x width wide and f = mean over tokens of (W t) / ||W t||.

An absent modality is one token, made from the stand-in of its projection: the others attend to this one token, and in
the concatenation it stands at every position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.models.check import token_count
from edgefl.models.encoder import TokenState, attend, joined_mask, mean_token
from edgefl.models.spec import ModelSpec, shared_width
from edgefl.models.vectors import unit

#: The paper has two modalities, whose concatenation is this many times as wide as one's tokens.
_PAIR = 2


class Given(NamedTuple):
    """One modality's part of a batch of B rows.

    ``r`` [B, d]: projections, stand-ins where it is absent; ``state``: tokens [n, T, D] of its own rows, None: no row
    has it; ``rows`` [n]: which rows these are, None: all; ``has`` [B]: rows whose tokens count, None: all of ``rows``.
    """

    r: Tensor
    state: TokenState | None
    rows: Tensor | None
    has: Tensor | None


class Sequence(NamedTuple):
    """Tokens [B, T, W], which of them are real [B, T], and which rows have the modality [B]; None: all."""

    tokens: Tensor
    mask: Tensor | None
    has: Tensor | None


class Attention(nn.Module):
    """Multi-head attention: queries [B, N, W], keys and values from [B, T, W], mask [B, T] or None -> [B, N, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = self.out(attend(self.q(queries), self.k(keys), self.v(keys), self.heads, mask))
        return out


class SelfLayer(nn.Module):
    """Pre-norm transformer layer, four times as wide inside: [B, N, W] -> [B, N, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.attention_norm(tokens)
        tokens = tokens + self.attention(normed, normed, mask)
        after: Tensor = tokens + self.mlp(self.mlp_norm(tokens))
        return after


class JointInput(nn.Module):
    """One modality's way in: its tokens to the joint width with positions, or one token from a stand-in."""

    def __init__(self, tokens: int, token_width: int, projection_width: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(token_width, width)
        self.stand_in = nn.Linear(projection_width, width)
        self.position_embeddings = nn.Parameter(torch.zeros(1, tokens, width))

    def forward(self, given: Given) -> Sequence:
        one = self.stand_in(given.r).unsqueeze(1)  # [B, 1, W]
        if given.state is None:
            return Sequence(one, None, torch.zeros_like(given.r[:, 0], dtype=torch.bool))
        length = given.state.tokens.shape[1]
        own = self.tokens(given.state.tokens) + self.position_embeddings[:, :length]
        tokens, mask, has = spread(own, given.state.mask, given)
        if has is None:
            return Sequence(tokens, mask, None)
        first = torch.arange(length, device=tokens.device) == 0
        alone = torch.cat((one, torch.zeros_like(tokens[:, 1:])), dim=1)
        row = has.unsqueeze(1)
        # Not torch.where, which onnxruntime cannot do on flags.
        mask = row | first if mask is None else (row & mask) | (~row & first)
        return Sequence(torch.where(row.unsqueeze(2), tokens, alone), mask, has)


class JointFusion(nn.Module):
    """The tokens of every modality of the model -> f [B, head.out], a unit vector where the projection is shared."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        joint, encoders = spec.joint, list(spec.encoders.values())
        counts = [token_count(encoder) for encoder in encoders]
        self.length = min(counts)
        self.inputs = nn.ModuleList(
            JointInput(count, encoder.width, spec.head.out, joint.width)
            for count, encoder in zip(counts, encoders, strict=True)
        )
        crossing = encoders if len(encoders) > 1 else []  # a single modality has no others to attend to
        self.norms = nn.ModuleList(nn.LayerNorm(joint.width) for _ in crossing)
        self.cross = nn.ModuleList(Attention(joint.width, joint.heads) for _ in crossing)
        whole = len(encoders) * joint.width
        self.shared = joint.shared
        if self.shared:
            paired = _PAIR * joint.width
            self.merge = nn.Identity() if whole == paired else nn.Linear(whole, paired)
            self.widen = nn.Linear(paired, shared_width(spec))
            whole = paired
        self.layers = nn.ModuleList(SelfLayer(whole, joint.heads) for _ in range(joint.layers))
        self.project = nn.Linear(shared_width(spec) if self.shared else whole, spec.head.out)

    def forward(self, given: list[Given]) -> Tensor:
        """``given``: in the order of the specification's encoders."""
        sequences = self._attend([enter(one) for enter, one in zip(self.inputs, given, strict=True)])
        evened = [evened_out(sequence, self.length) for sequence in sequences]
        tokens = torch.cat([part for part, _ in evened], dim=2)  # [B, L, M W]
        masks = [mask for _, mask in evened if mask is not None]
        # A position is real when it is in any modality.
        mask = torch.stack(masks).any(0) if len(masks) == len(evened) else None
        if self.shared:
            tokens = self.merge(tokens)
        for layer in self.layers:
            tokens = layer(tokens, mask)
        if self.shared:
            return self.embed(self.widen(mean_token(tokens, mask)))
        return mean_token(F.normalize(self.project(tokens), dim=2), mask)

    def embed(self, h: Tensor) -> Tensor:
        """The shared projection: h [B, shared width] -> unit vectors [B, head.out]."""
        return unit(self.project(h))

    def _attend(self, sequences: list[Sequence]) -> list[Sequence]:
        if not self.cross:
            return sequences
        normed = [norm(s.tokens) for norm, s in zip(self.norms, sequences, strict=True)]
        after = []
        for i, (attention, sequence) in enumerate(zip(self.cross, sequences, strict=True)):
            others = [j for j in range(len(sequences)) if j != i]
            mask = joined_mask([(sequences[j].tokens, sequences[j].mask) for j in others])
            change = attention(normed[i], torch.cat([normed[j] for j in others], dim=1), mask)
            after.append(sequence._replace(tokens=sequence.tokens + change))
        return after


def evened_out(sequence: Sequence, length: int) -> tuple[Tensor, Tensor | None]:
    """[B, T, W] -> [B, ``length``, W] by adaptive average pooling over real tokens, and which results are real.

    Bin i averages the tokens floor(i T / length) … ceil((i + 1) T / length) - 1. Where the modality is absent its one
    token is repeated. A bin without a real token is zero and not real.
    """
    tokens, mask, has = sequence
    # As a matrix, because exported graphs have no adaptive pooling to lengths that do not divide each other.
    size = tokens.shape[1]
    i = torch.arange(length, device=tokens.device).unsqueeze(1)
    at = torch.arange(size, device=tokens.device)
    bins = ((at >= i * size // length) & (at < -(-(i + 1) * size // length))).to(tokens.dtype)  # [length, T]
    if mask is None:
        return bins @ tokens / bins.sum(dim=1, keepdim=True), None
    real = mask.to(tokens.dtype).unsqueeze(2)
    counts = bins @ real  # [B, length, 1]
    pooled = bins @ (tokens * real) / counts.clamp(min=1)
    found = counts.squeeze(2) > 0
    if has is None:
        return pooled, found
    row = has.unsqueeze(1)
    return torch.where(row.unsqueeze(2), pooled, tokens[:, :1]), found | ~row


def spread(own: Tensor, mask: Tensor | None, given: Given) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens and mask of a modality's own rows as those of all B rows, and which rows have it (None: all)."""
    if given.rows is None:
        return own, mask, given.has
    size = len(given.r)
    tokens = own.new_zeros(size, *own.shape[1:]).index_copy(0, given.rows, own)
    known = torch.zeros(size, dtype=torch.bool, device=own.device).index_fill(0, given.rows, True)
    if mask is not None:
        mask = mask.new_zeros(size, mask.shape[1]).index_copy(0, given.rows, mask)
    return tokens, mask, known if given.has is None else known & given.has
