"""Planning on shapes alone: what it imports."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch import nn
from edgefl.resources.meta_device import meta_device

def passed():
    with meta_device():
        layers = [nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.LayerNorm(8)]
        model = nn.Sequential(*layers, nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 5))
        logits = model(torch.empty(2, 3, 8))
        torch.nn.functional.cross_entropy(logits, torch.empty(2, dtype=torch.int64)).backward()
        attention = nn.MultiheadAttention(8, 2)
        attended, _ = attention(*[torch.empty(2, 3, 8)] * 3)
    return [tuple(logits.shape), tuple(attended.shape), tuple(model[0].weight.grad.shape)]

print(passed(), "torch._dynamo" in sys.modules)
"""


def test_shapes_are_found_without_the_compiler() -> None:
    """Its import is 78 MiB and a second of a processor in everything that plans."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split("] ") == ["[(2, 5), (2, 3, 8), (4, 3, 3)", "False\n"]


def test_a_torch_that_keeps_the_mark_elsewhere_still_finds_shapes() -> None:
    """The compiler is imported then, as it is where nobody has asked for less."""
    without = PROGRAM.replace(
        "import torch\n", "import torch\nfrom torch import _compile\ndel _compile._disable_dynamo\n", 1
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=True)
    assert done.stdout.split("] ") == ["[(2, 5), (2, 3, 8), (4, 3, 3)", "True\n"]
