"""An encoder's last block for the tokens that are pooled alone: they attend to all others, nothing else is computed.

Exact: what the other tokens become is never read. Of a block as wide as ViT's this leaves the keys and values of all
tokens, a sixth of its multiplications. `transformers`' blocks are read by the names of their layers; a version that
names them otherwise runs the whole block, and the rest is cut away.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

#: What the layers of the attention are called: ViT and AST, DistilBERT, BERT (its inner attention).
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"), ("query", "key", "value"))


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """[B, n, D] of queries [B, n, D], keys and values [B, N, D], mask [B, N] (True: real) or None."""
    q, k, v = (x.reshape(len(x), x.shape[1], heads, -1).transpose(1, 2) for x in (queries, keys, values))
    seen = None if mask is None else mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout).transpose(1, 2).flatten(2)


def leading_vit(block: Any, tokens: Tensor, count: int) -> Tensor | None:
    """The first ``count`` tokens of [B, N, D] after a ViT or AST block [B, count, D]; None: a block of other names."""
    attention = block.attention
    if not all(hasattr(attention, name) for name in (*_PROJECTIONS[0], "o_proj", "num_attention_heads")):
        return None
    before = block.layernorm_before(tokens)
    attended = attention.o_proj(_attended(attention, _PROJECTIONS[0], before, count, attention.num_attention_heads))
    after = tokens[:, :count] + block.dropout(attended)
    result: Tensor = after + block.dropout(block.mlp(block.layernorm_after(after)))
    return result


def leading_distilbert(block: Any, tokens: Tensor, mask: Tensor | None, count: int) -> Tensor | None:
    """As ``leading_vit``, of a DistilBERT block; ``mask`` [B, N]: which tokens are real."""
    attention = block.attention
    if not all(hasattr(attention, name) for name in (*_PROJECTIONS[1], "out_lin", "n_heads")):
        return None
    attended = attention.out_lin(_attended(attention, _PROJECTIONS[1], tokens, count, attention.n_heads, mask))
    after = block.sa_layer_norm(attended + tokens[:, :count])
    result: Tensor = block.output_layer_norm(block.ffn(after) + after)
    return result


def leading_bert(block: Any, tokens: Tensor, mask: Tensor | None, count: int) -> Tensor | None:
    """As ``leading_distilbert``, of a BERT block."""
    inner: Any = getattr(block.attention, "self", None)
    if not all(hasattr(inner, name) for name in (*_PROJECTIONS[2], "num_attention_heads")):
        return None
    attended = _attended(inner, _PROJECTIONS[2], tokens, count, inner.num_attention_heads, mask)
    after = block.attention.output(attended, tokens[:, :count])
    result: Tensor = block.feed_forward_chunk(after)
    return result


def _attended(
    attention: Any,
    names: tuple[str, str, str],
    tokens: Tensor,
    count: int,
    heads: int,
    mask: Tensor | None = None,
) -> Tensor:
    q, k, v = (getattr(attention, name) for name in names)
    given = getattr(attention, "dropout", None)
    share = float(given.p if isinstance(given, nn.Dropout) else attention.attention_dropout)
    return attend(q(tokens[:, :count]), k(tokens), v(tokens), heads, mask, share if attention.training else 0.0)
