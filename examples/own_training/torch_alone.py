"""A training loop as many people have one: pictures in folders of their labels, a small network, plain torch."""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

LABELS = ("circle", "cross", "square", "triangle")


def pictures(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures [N, 3, 32, 32] in -1..1 and labels [N] of folder/<label>/<id>.png, then as many to test on."""
    files = sorted(folder.glob("*/*.png"))
    pixels = [np.asarray(Image.open(file).convert("RGB").resize((32, 32)), np.float32) for file in files]
    labels = [LABELS.index(file.parent.name) for file in files]
    x, y = torch.tensor(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor(labels)
    return x[::2], y[::2], x[1::2], y[1::2]


class Net(nn.Module):
    """Two convolutions and a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 4 * 4, len(LABELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(torch.relu(self.conv2(x)), 4)
        return self.fc(x.flatten(1))


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of right answers."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    """Train on the pictures in the folder that the command names; save the model."""
    x, y, test_x, test_y = pictures(Path(sys.argv[1]))
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in range(10):
        for rows in torch.randperm(len(x)).split(16):
            loss = functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy(model, test_x, test_y):.3f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
