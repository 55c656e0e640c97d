"""Random changes of a batch that leave its class, by kind of encoder, for pretraining. Drawn from torch's generator."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor


def pictures(x: Tensor) -> Tensor:
    """[B, H, W, C]: turned by up to 12 degrees, scaled by up to 15 %, moved by up to a tenth; coloured ones mirrored
    and dyed. What comes in from outside has the colour of the edge.
    """
    size, channels = len(x), x.shape[3]
    angle, scale = _between(-0.2, 0.2, size), _between(0.85, 1.15, size)
    mirrored = torch.where(torch.rand(size) < 0.5, -1.0, 1.0) if channels == 3 else torch.ones(size)
    cosine, sine = scale * torch.cos(angle), scale * torch.sin(angle)
    rows = [
        torch.stack([cosine * mirrored, -sine, _between(-0.2, 0.2, size)], dim=1),
        torch.stack([sine * mirrored, cosine, _between(-0.2, 0.2, size)], dim=1),
    ]
    moved = x.permute(0, 3, 1, 2)
    grid = F.affine_grid(torch.stack(rows, dim=1), list(moved.shape), align_corners=False)
    moved = F.grid_sample(moved, grid, padding_mode="border", align_corners=False)
    if channels == 3:
        moved = (1 - (1 - moved) * _between(0.7, 1.3, size, 3, 1, 1)).clamp(0, 1)  # white stays white
    return moved.permute(0, 2, 3, 1)


def sounds(x: Tensor) -> Tensor:
    """[B, T, bands] log-mel: moved by up to 6 frames and 2 bands, louder or softer, noise; some frames and bands of
    each sample are silent (SpecAugment, arXiv 1904.08779).
    """
    size, time, bands = x.shape
    frame = (torch.arange(time) + torch.randint(-6, 7, (size, 1))).clamp(0, time - 1)
    band = (torch.arange(bands) + torch.randint(-2, 3, (size, 1))).clamp(0, bands - 1)
    moved = x.gather(1, frame[:, :, None].expand(-1, -1, bands)).gather(2, band[:, None].expand(-1, time, -1))
    moved = moved + _between(-0.1, 0.1, size, 1, 1) + 0.03 * torch.randn_like(moved)
    return moved * _outside(size, time, 8)[:, :, None] * _outside(size, bands, 6)[:, None]


def signals(x: Tensor) -> Tensor:
    """[B, T, C]: a window that starts elsewhere (round its end), each axis up to 15 % stronger or weaker and moved by
    up to 0.15, noise.
    """
    size, time, channels = x.shape
    order = (torch.arange(time) + torch.randint(0, time, (size, 1))) % time
    moved = x.gather(1, order[:, :, None].expand(-1, -1, channels))
    moved = moved * _between(0.85, 1.15, size, 1, channels) + _between(-0.15, 0.15, size, 1, channels)
    return moved + 0.05 * torch.randn_like(moved)


def words(x: Tensor) -> Tensor:
    """[B, N] ids: each token but the first left out (the padding's 0) with a probability of 0.15."""
    left = torch.rand(x.shape) >= 0.15
    left[:, 0] = True
    return x * left


def _between(low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape)


def _outside(size: int, length: int, widest: int) -> Tensor:
    """[size, length]: 0 in a span of up to ``widest`` somewhere, 1 elsewhere."""
    start = torch.randint(0, length, (size, 1))
    width = torch.randint(0, widest + 1, (size, 1))
    place = torch.arange(length)
    return ((place < start) | (place >= start + width)).float()


#: Kind of encoder -> its changes.
AUGMENT: dict[str, Callable[[Tensor], Tensor]] = {
    "vision": pictures,
    "audio": sounds,
    "sensor": signals,
    "text": words,
}
