"""The text encoder: DistilBERT (arXiv 1910.01108) or BERT (arXiv 1810.04805) cut into parts.

Pooled is the first token (BERT without its pooler). Both normalise at the end of each block and have no final norm, so
the ``norm`` part changes nothing and holds no tensors; it exists so that all encoders have the same parts. Every token
of a text is of BERT's first type.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgefl.models.blocks import BERT, DISTILBERT, PostNormBlock, WordTokens
from edgefl.models.encoders.base import Kind, TokenState, first_token
from edgefl.models.spec import EncoderSpec

#: Of BERT's tokens: those of a first and of a second sentence.
_TYPES = 2


class TextEmbed(nn.Module):
    """Token ids [B, L] (int64, 0 = padding) -> tokens [B, L, D] and which of them are real.

    The first position always counts as real: a text that is all padding (an absent sample's row of zeros) then yields
    finite numbers instead of a softmax over nothing.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.embeddings = WordTokens(spec, _TYPES if spec.arch == "bert" else 0)

    def forward(self, x: Tensor) -> TokenState:
        mask = torch.cat((torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != 0), dim=1)
        return TokenState(self.embeddings(x), mask)


def _block(spec: EncoderSpec) -> nn.Module:
    return PostNormBlock(spec, BERT if spec.arch == "bert" else DISTILBERT)


def _norm(_spec: EncoderSpec) -> nn.Module:
    return nn.Identity()


KIND = Kind(embed=TextEmbed, block=_block, norm=_norm, pool=first_token)
