"""The bands encoder of sound: a transformer over short spans of a spectrogram, and wide, for a few hundred clips.

Tokens are spans of ``patch`` frames of all mel bands, not squares of it as in AST (arXiv 2104.01778). Before them stand
a class token and a linear map of each band's mean and deviation over the clip (wide and deep, arXiv 1606.07792), which
is what simple classifiers of sounds are given. Bands are scaled by constants of the specification.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.models.encoder import TokenState
from edgefl.models.spec import EncoderSpec

#: Below any variance of a standardised band; keeps the root's gradient finite where a clip is silent.
_LEAST_VARIANCE = 1e-4


class BandsEmbed(nn.Module):
    """[B, frames, bands] -> tokens [B, 2 + ceil(frames / patch), D]. Frames of silence at a clip's end do not count."""

    mean: Tensor  # [bands]
    std: Tensor

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        frames, bands = spec.input_shape
        self.padding = -frames % spec.patch
        self.spans = (frames + self.padding) // spec.patch
        self.project = nn.Linear(spec.patch * bands, spec.width)
        self.wide = nn.Linear(2 * bands, spec.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 1 + self.spans, spec.width))
        self.dropout = nn.Dropout(spec.dropout)
        # No part of the part: they come with the specification.
        self.register_buffer("mean", torch.tensor(spec.mean or (0.0,) * bands), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std or (1.0,) * bands), persistent=False)

    def forward(self, x: Tensor) -> TokenState:
        real = (x.amax(dim=2, keepdim=True) > 0).to(x.dtype)  # [B, F, 1]
        scaled = (x - self.mean) / self.std * real
        count = real.sum(dim=1).clamp(min=1)
        mean = scaled.sum(dim=1) / count
        variance = ((scaled - mean.unsqueeze(1)) ** 2 * real).sum(dim=1) / count
        wide = self.wide(torch.cat((mean, (variance + _LEAST_VARIANCE).sqrt()), dim=1)).unsqueeze(1)
        padded = F.pad(scaled, (0, 0, 0, self.padding)) if self.padding else scaled
        spans = self.project(padded.reshape(x.shape[0], self.spans, -1))
        tokens = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), spans), dim=1) + self.position_embeddings
        return TokenState(self.dropout(torch.cat((tokens[:, :1], wide, tokens[:, 1:]), dim=1)))
