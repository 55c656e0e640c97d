"""A plain torch module as an encoder: two convolutions over time, then a GRU (after DeepConvLSTM, Sensors 16(1):115).

Nothing in the module is EdgeFL's: the last line brings it, and says which of its layers each stage trains.
"""

from __future__ import annotations

from torch import Tensor, nn

import edgefl


class ConvGru(nn.Module):
    """[B, T, 3] -> [B, 48]: layers of 16, 32 and 48 channels, whose time steps halve twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 16, 5, stride=2, padding=2)
        self.first_norm = nn.BatchNorm1d(16)
        self.second = nn.Conv1d(16, 32, 5, stride=2, padding=2)
        self.second_norm = nn.BatchNorm1d(32)
        self.gru = nn.GRU(32, 48, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_norm(self.first(x.transpose(1, 2))).relu()
        x = self.second_norm(self.second(x)).relu().transpose(1, 2)
        steps, _ = self.gru(x)
        return steps.mean(dim=1)


CONV_GRU = edgefl.encoder(
    ConvGru, input_shape=(50, 3), stages=[["first", "first_norm"], ["second", "second_norm"], ["gru"]]
)
