"""Published encoders cut into parts: ViT, DistilBERT or BERT, AST; in plain torch, tensors named as in checkpoints.

The blocks of `transformers` are the same to rounding (tests compare them), but importing them takes 147 MiB in every
trainer, and they cannot run for the pooled tokens alone (docs/decisions/0020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.models.bag import BagBlock, BagEmbed
from edgefl.models.bands import BandsEmbed
from edgefl.models.conv import ConvEmbed
from edgefl.models.encoder import Kind, TokenState, attend, first_token
from edgefl.models.spec import EncoderSpec

#: Of all norms of these encoders.
EPSILON = 1e-12


class Names(NamedTuple):
    """Names of a block's layers, by their paths. Either half has a norm: before it, or after its sum."""

    query: str
    key: str
    value: str
    out: str
    attention_norm: str
    up: str
    down: str
    feed_norm: str


VIT = Names(
    *("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "layernorm_before"),
    *("mlp.fc1", "mlp.fc2", "layernorm_after"),
)
DISTILBERT = Names(
    *("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm"),
    *("ffn.lin1", "ffn.lin2", "output_layer_norm"),
)
BERT = Names(
    *("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    *("attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
)


def leading(tokens: Tensor, count: int) -> Tensor:
    """The first ``count`` of tokens [B, N, D]; 0: all."""
    return tokens[:, :count] if count else tokens


class _Block(nn.Module):
    """The layers of a block under the ``names`` of its kind."""

    def __init__(self, spec: EncoderSpec, names: Names) -> None:
        super().__init__()
        width, hidden = spec.width, int(spec.width * spec.mlp_ratio)
        self.heads = spec.heads
        self.attention_dropout = spec.dropout
        self.names = names
        sizes = {names.up: (width, hidden), names.down: (hidden, width)}
        for path in names:
            norm = path in (names.attention_norm, names.feed_norm)
            hang(self, path, nn.LayerNorm(width, eps=EPSILON) if norm else nn.Linear(*sizes.get(path, (width, width))))
        self.dropout = nn.Dropout(spec.dropout)

    def gather(self, asking: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of ``asking`` [B, n, D] over those of ``tokens`` [B, N, D] that are real by ``mask`` [B, N]."""
        query, key, value, out = (self.get_submodule(path) for path in self.names[:4])
        dropout = self.attention_dropout if self.training else 0.0
        result: Tensor = out(attend(query(asking), key(tokens), value(tokens), self.heads, mask, dropout))
        return result

    def feed(self, tokens: Tensor) -> Tensor:
        """The feed-forward network, token by token: [B, n, D] -> [B, n, D]."""
        up, down = self.get_submodule(self.names.up), self.get_submodule(self.names.down)
        result: Tensor = self.dropout(down(F.gelu(up(tokens))))
        return result

    def norm(self, path: str, tokens: Tensor) -> Tensor:
        """The norm at ``path``: [B, n, D] -> [B, n, D]."""
        result: Tensor = self.get_submodule(path)(tokens)
        return result


class PreNormBlock(_Block):
    """x + attention(norm(x)), then x + mlp(norm(x)): ViT (arXiv 2010.11929), AST (arXiv 2104.01778)."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__(spec, VIT)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, count: int = 0) -> Tensor:
        """[B, N, D] -> [B, N, D], or of the first ``count`` tokens alone [B, count, D]."""
        normed = self.norm(self.names.attention_norm, tokens)
        after = leading(tokens, count) + self.dropout(self.gather(leading(normed, count), normed, mask))
        result: Tensor = after + self.feed(self.norm(self.names.feed_norm, after))
        return result


class PostNormBlock(_Block):
    """norm(x + attention(x)), then norm(x + mlp(x)): BERT (arXiv 1810.04805), DistilBERT (arXiv 1910.01108)."""

    def __init__(self, spec: EncoderSpec, names: Names) -> None:
        super().__init__(spec, names)
        self.drops_gathered = names is BERT

    def forward(self, tokens: Tensor, mask: Tensor | None = None, count: int = 0) -> Tensor:
        """As ``PreNormBlock.forward``; ``mask`` [B, N]: which tokens are real."""
        asking = leading(tokens, count)
        gathered = self.gather(asking, tokens, mask)
        if self.drops_gathered:
            gathered = self.dropout(gathered)
        after = self.norm(self.names.attention_norm, gathered + asking)
        return self.norm(self.names.feed_norm, self.feed(after) + after)


def final_norm(spec: EncoderSpec) -> nn.Module:
    """The norm after the last pre-norm block: [B, N, D] -> [B, N, D]."""
    return nn.LayerNorm(spec.width, eps=EPSILON)


class PatchTokens(nn.Module):
    """Patches of pictures [B, C, H, W] as tokens behind ``leading`` learned ones [B, leading + patches, D].

    ``size``: H and W in pixels (of a spectrogram: bands and frames); what is over at their ends is not looked at.
    """

    def __init__(self, spec: EncoderSpec, size: tuple[int, int], channels: int, leading: Iterable[str]) -> None:
        super().__init__()
        self.leading = tuple(leading)
        stride = spec.stride or spec.patch
        patches = ((size[0] - spec.patch) // stride + 1) * ((size[1] - spec.patch) // stride + 1)
        for name in self.leading:
            self.register_parameter(name, nn.Parameter(torch.zeros(1, 1, spec.width)))
        hang(self, "patch_embeddings.projection", nn.Conv2d(channels, spec.width, spec.patch, stride))
        self.position_embeddings = nn.Parameter(torch.zeros(1, len(self.leading) + patches, spec.width))
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = self.get_submodule("patch_embeddings.projection")(pictures).flatten(2).transpose(1, 2)
        learned = [self.get_parameter(name).expand(pictures.shape[0], -1, -1) for name in self.leading]
        result: Tensor = self.dropout(torch.cat([*learned, patches], dim=1) + self.position_embeddings)
        return result


class WordTokens(nn.Module):
    """Token ids [B, L] (0: padding) -> tokens [B, L, D]. ``types``: BERT's token types, of which the first is used."""

    def __init__(self, spec: EncoderSpec, types: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(spec.vocabulary, spec.width, padding_idx=0)
        self.position_embeddings = nn.Embedding(spec.positions or spec.input_shape[0], spec.width)
        self.token_type_embeddings = nn.Embedding(types, spec.width) if types else None
        self.LayerNorm = nn.LayerNorm(spec.width, eps=EPSILON)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.position_embeddings.weight[: ids.shape[1]]
        if self.token_type_embeddings is not None:
            places = places + self.token_type_embeddings.weight[0]
        result: Tensor = self.dropout(self.LayerNorm(self.word_embeddings(ids) + places))
        return result


def hang(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put ``module`` below ``root`` at a path with dots, in modules without anything of their own.

    What is there already is replaced.
    """
    *owners, name = path.split(".")
    for owner in owners:
        if not hasattr(root, owner):
            root.add_module(owner, nn.Module())
        root = root.get_submodule(owner)
    root.add_module(name, module)


#: ViT's own preprocessing: pixels of 0..1 become -1..1. A checkpoint with another one is converted when it is loaded.
PIXEL_MEAN = 0.5
PIXEL_DEVIATION = 0.5


class VisionEmbed(nn.Module):
    """ViT (arXiv 2010.11929): [B, H, W, C] in 0..1 -> tokens [B, 1 + patches, D]. Pooled is the class token."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        height, width, channels = spec.input_shape
        self.embeddings = PatchTokens(spec, (height, width), channels, ["cls_token"])

    def forward(self, x: Tensor) -> TokenState:
        pixels = (x.permute(0, 3, 1, 2) - PIXEL_MEAN) / PIXEL_DEVIATION
        return TokenState(self.embeddings(pixels))


VISION = Kind(
    embed=lambda spec: ConvEmbed(spec) if spec.arch == "conv" else VisionEmbed(spec),
    block=PreNormBlock,
    norm=final_norm,
    pool=first_token,
)


class TextEmbed(nn.Module):
    """DistilBERT, BERT: token ids [B, L] (int64, 0 = padding) -> tokens [B, L, D] and which of them are real.

    Pooled is the first token (BERT without its pooler). Both normalise at the end of each block, so that the part
    ``norm`` changes nothing and holds no tensors. Every token of a text is of the first of BERT's two types.
    The first position always counts as real: a text that is all padding (an absent sample's row of zeros) then yields
    finite numbers instead of a softmax over nothing.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.embeddings = WordTokens(spec, 2 if spec.arch == "bert" else 0)

    def forward(self, x: Tensor) -> TokenState:
        mask = torch.cat((torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != 0), dim=1)
        return TokenState(self.embeddings(x), mask)


class Text(NamedTuple):
    """The modules of a text encoder of one ``arch``."""

    embed: Callable[[EncoderSpec], nn.Module]
    block: Callable[[EncoderSpec], nn.Module]
    norm: Callable[[EncoderSpec], nn.Module] = lambda _: nn.Identity()


_TEXTS = {
    "distilbert": Text(TextEmbed, lambda spec: PostNormBlock(spec, DISTILBERT)),
    "bert": Text(TextEmbed, lambda spec: PostNormBlock(spec, BERT)),
    "bag": Text(BagEmbed, BagBlock, final_norm),
}
TEXT = Kind(
    embed=lambda spec: _TEXTS[spec.arch].embed(spec),
    block=lambda spec: _TEXTS[spec.arch].block(spec),
    norm=lambda spec: _TEXTS[spec.arch].norm(spec),
    pool=first_token,
)


class AudioEmbed(nn.Module):
    """AST: spectrogram [B, frames, bands], scaled as the data set says -> tokens [B, 2 + patches, D].

    Band by band; pooled is, as in the original, the mean of the class token and the distillation token.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        frames, bands = spec.input_shape
        self.embeddings = PatchTokens(spec, (bands, frames), 1, ["cls_token", "distillation_token"])

    def forward(self, x: Tensor) -> TokenState:
        return TokenState(self.embeddings(x.transpose(1, 2)[:, None]))


def _mean_of_two(tokens: Tensor) -> Tensor:
    return (tokens[:, 0] + tokens[:, 1]) / 2


AUDIO = Kind(
    embed=lambda spec: BandsEmbed(spec) if spec.arch == "bands" else AudioEmbed(spec),
    block=PreNormBlock,
    norm=final_norm,
    pool=_mean_of_two,
)
