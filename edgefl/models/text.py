"""The text encoder: `transformers`' DistilBERT (arXiv 1910.01108) or BERT (arXiv 1810.04805) cut into parts.

Pooled is the first token (BERT without its pooler). Both normalise at the end of each block and have no final norm, so
the ``norm`` part changes nothing and holds no tensors; it exists so that all encoders have the same parts. Every token
of a text is of BERT's first type.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer
from transformers.models.distilbert.configuration_distilbert import DistilBertConfig
from transformers.models.distilbert.modeling_distilbert import Embeddings, TransformerBlock

from edgefl.models.encoder import Kind, TokenState, first_token, only_tensor
from edgefl.models.leading import leading_bert, leading_distilbert
from edgefl.models.spec import EncoderSpec


def distilbert_config(spec: EncoderSpec) -> DistilBertConfig:
    """The encoder as `transformers` describes it."""
    return DistilBertConfig(
        vocab_size=spec.vocabulary,
        max_position_embeddings=spec.positions or spec.input_shape[0],
        n_layers=spec.depth,
        n_heads=spec.heads,
        dim=spec.width,
        hidden_dim=int(spec.width * spec.mlp_ratio),
        dropout=spec.dropout,
        attention_dropout=spec.dropout,
        pad_token_id=0,
        attn_implementation="sdpa",
    )


def bert_config(spec: EncoderSpec) -> BertConfig:
    """The encoder as `transformers` describes it."""
    return BertConfig(
        vocab_size=spec.vocabulary,
        max_position_embeddings=spec.positions or spec.input_shape[0],
        num_hidden_layers=spec.depth,
        num_attention_heads=spec.heads,
        hidden_size=spec.width,
        intermediate_size=int(spec.width * spec.mlp_ratio),
        hidden_dropout_prob=spec.dropout,
        attention_probs_dropout_prob=spec.dropout,
        pad_token_id=0,
        attn_implementation="sdpa",
    )


class TextEmbed(nn.Module):
    """Token ids [B, L] (int64, 0 = padding) -> tokens [B, L, D] and which of them are real.

    The first position always counts as real: a text that is all padding (an absent sample's row of zeros) then yields
    finite numbers instead of a softmax over nothing.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        bert = spec.arch == "bert"
        self.embeddings = BertEmbeddings(bert_config(spec)) if bert else Embeddings(distilbert_config(spec))

    def forward(self, x: Tensor) -> TokenState:
        mask = torch.cat((torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != 0), dim=1)
        return TokenState(self.embeddings(x), mask)


def _block(spec: EncoderSpec) -> nn.Module:
    block: nn.Module = (
        BertLayer(bert_config(spec)) if spec.arch == "bert" else TransformerBlock(distilbert_config(spec))
    )
    return block


def _run_block(block: nn.Module, tokens: Tensor, mask: Tensor | None) -> Tensor:
    # [B, L] -> [B, 1, 1, L]: every head and query sees the same keys
    return only_tensor(block(tokens, None if mask is None else mask[:, None, None, :]))


def _norm(_spec: EncoderSpec) -> nn.Module:
    return nn.Identity()


def _run_leading(block: nn.Module, tokens: Tensor, mask: Tensor | None, count: int) -> Tensor | None:
    run = leading_bert if isinstance(block, BertLayer) else leading_distilbert
    return run(block, tokens, mask, count)


KIND = Kind(
    embed=TextEmbed,
    block=_block,
    run_block=_run_block,
    norm=_norm,
    pool=first_token,
    pooled=1,
    run_leading=_run_leading,
)
