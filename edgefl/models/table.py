"""The table encoder: a transformer over columns, after FT-Transformer (Gorishniy et al., arXiv 2106.11959), and wide.

A token a column: x w + b of a number, a row of a table of vectors by a category's code, and a learned vector of its own
for a cell that is not there. A class token, no positions, the sensor's pre-norm blocks. Beside it a linear map of the
same cells goes into the class token (wide and deep, Cheng et al., arXiv 1606.07792). A number is standardised by
constants of the specification and compressed, 3 asinh(x / 3): logarithmic far out, so that an order of 30 deviations
still counts more than one of ten.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from edgefl.models.encoder import Kind, TokenState, first_token
from edgefl.models.sensor import SensorBlock
from edgefl.models.spec import EncoderSpec

#: Deviations from the mean up to which a value stays about as it is; at two of them it is 6 % smaller.
_LINEAR = 3.0
#: Bounds what is squared: the largest float32 would become infinite.
_LARGEST = 1e4


class TableEmbed(nn.Module):
    """[B, C, 2] (value, 1 if the cell is there) -> tokens [B, 1 + C, D], of numbers before those of categories."""

    mean: Tensor  # [numbers]
    std: Tensor
    first: Tensor  # [categories] rows of the vectors: that of a category which is not there
    count: Tensor  # [categories] how many values each has

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        columns = range(spec.input_shape[0])
        values = [len(column.values) for column in spec.columns] or [0] * len(columns)
        self.numbers = [c for c in columns if not values[c]]
        self.categories = [c for c in columns if values[c]]
        width, numbers = spec.width, len(self.numbers)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        if numbers:
            self.weight = nn.Linear(width, numbers, bias=False)  # w, as a map's [numbers, D]: drawn as one
            self.bias = nn.Linear(width, numbers, bias=False)
            self.missing = nn.Linear(width, numbers, bias=False)
            self.wide = nn.Linear(2 * numbers, width)
            mean, std = (spec.mean, spec.std) if spec.mean else ((0.0,) * len(columns), (1.0,) * len(columns))
            # No part of the part: they come with the specification.
            self.register_buffer("mean", torch.tensor([mean[c] for c in self.numbers]), persistent=False)
            self.register_buffer("std", torch.tensor([std[c] for c in self.numbers]), persistent=False)
        if self.categories:
            sizes = [1 + values[c] for c in self.categories]
            first = list(itertools.accumulate(sizes, initial=0))
            self.vectors = nn.Embedding(first[-1], width)
            self.wide_vectors = nn.Embedding(first[-1], width)
            self.register_buffer("first", torch.tensor(first[:-1]), persistent=False)
            self.register_buffer("count", torch.tensor([size - 1 for size in sizes]), persistent=False)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor) -> TokenState:
        tokens: list[Tensor] = []
        values, flags = x[:, :, 0], x[:, :, 1] > 0.5
        lead = self.cls_token[:, 0]  # [1, D], then [B, D]
        if self.numbers:
            there = flags[:, self.numbers]  # [B, numbers]
            scaled = ((values[:, self.numbers] - self.mean) / self.std).clamp(-_LARGEST, _LARGEST)
            z = torch.where(there, _LINEAR * torch.asinh(scaled / _LINEAR), 0.0)
            given = z.unsqueeze(2) * self.weight.weight + self.bias.weight
            tokens.append(torch.where(there.unsqueeze(2), given, self.missing.weight))
            lead = lead + self.wide(torch.cat((z, (~there).to(z.dtype)), dim=1))
        if self.categories:
            code = values[:, self.categories].round()
            known = flags[:, self.categories] & (code >= 0) & (code < self.count)
            rows = self.first + torch.where(known, code + 1, 0.0).long()  # [B, categories]
            tokens.append(self.vectors(rows))
            lead = lead + self.wide_vectors(rows).sum(dim=1)
        return TokenState(self.dropout(torch.cat((lead.unsqueeze(1), *tokens), dim=1)))


KIND = Kind(embed=TableEmbed, block=SensorBlock, norm=lambda spec: nn.LayerNorm(spec.width), pool=first_token)
