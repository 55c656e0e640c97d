"""The conv encoder of pictures: a transformer over the outcome of convolutions, and wide, for some hundred pictures.

In place of ViT's patches: 3 x 3 convolutions of stride 2, each with twice the channels of the one before, then 1 x 1
(early convolutions, Xiao et al., arXiv 2106.14881). Each is followed by a norm over the whole picture, where they have
batch norm: frozen stages and batches of few rows change nothing in it. Beside them a linear map of the pixels goes into
the class token (wide and deep, Cheng et al., arXiv 1606.07792), as simple classifiers of pictures are given them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgefl.models.encoder import TokenState
from edgefl.models.spec import EncoderSpec

#: Pixels a side of the linear map, at most: of larger pictures it is given means of neighbouring ones.
_WIDE = 32


class ConvEmbed(nn.Module):
    """Convolutional patch embedding with a class token.

    Images [B, H, W, C] in 0..1 -> tokens [B, 1 + patches, D]. log2(``patch``) convolutions of stride 2, then a 1 x 1
    one.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        height, width, channels = spec.input_shape
        layers: list[nn.Module] = []
        for left in reversed(range(spec.patch.bit_length() - 1)):
            wider = max(1, spec.width >> left)
            layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.GroupNorm(1, wider), nn.GELU()]
            channels = wider
        self.stem = nn.Sequential(*layers, nn.Conv2d(channels, spec.width, 1))
        self.mean_of = -(-height // _WIDE), -(-width // _WIDE)
        pixels = (height // self.mean_of[0]) * (width // self.mean_of[1])
        self.wide = nn.Linear(pixels * spec.input_shape[2], spec.width)
        patches = (height // spec.patch) * (width // spec.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 1 + patches, spec.width))
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor) -> TokenState:
        pixels = 2 * x.permute(0, 3, 1, 2) - 1
        patches = self.stem(pixels).flatten(2).transpose(1, 2)
        wide = self.wide(nn.functional.avg_pool2d(pixels, self.mean_of).flatten(1)).unsqueeze(1)
        tokens = torch.cat((self.cls_token + wide, patches), dim=1)
        return TokenState(self.dropout(tokens + self.position_embeddings))
