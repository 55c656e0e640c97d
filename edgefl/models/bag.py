"""The bag encoder of text: the mean of hashed words' and n-grams' vectors, then residual blocks; in plain torch.

h = norm(mean_i E[id_i]); each block h + W2 gelu(W1 norm(h)). After fastText (arXiv 1607.01759) with subwords (arXiv
1607.04606). It trains from random weights on a few hundred texts, where a transformer does not.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.models.encoder import TokenState
from edgefl.models.spec import EncoderSpec


class BagEmbed(nn.Module):
    """Ids [B, L] (0: padding) -> one token [B, 1, D]. A text that is all padding gives a finite token."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.vectors = nn.Embedding(spec.vocabulary, spec.width, padding_idx=0)
        self.norm = nn.LayerNorm(spec.width)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor) -> TokenState:
        real = (x != 0).to(self.vectors.weight.dtype).unsqueeze(2)
        mean = (self.vectors(x) * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True).clamp(min=1)
        return TokenState(self.dropout(self.norm(mean)))


class BagBlock(nn.Module):
    """Residual block on single tokens: [B, 1, D] -> [B, 1, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        hidden = int(spec.width * spec.mlp_ratio)
        self.norm = nn.LayerNorm(spec.width)
        self.up = nn.Linear(spec.width, hidden)
        self.down = nn.Linear(hidden, spec.width)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, count: int = 0) -> Tensor:
        """The block's tokens [B, 1, D]; of one token, ``mask`` and ``count`` change nothing."""
        after: Tensor = tokens + self.dropout(self.down(F.gelu(self.up(self.norm(tokens)))))
        return after
