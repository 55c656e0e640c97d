"""Small tensors for the tests of the loss's terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings

from edgefl.prototypes.mask import Table
from edgefl.registry import chosen

torch.set_num_threads(1)
ORACLES = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "oracles/oracles.json").read_text())["cases"]
}
EXAMPLES = settings(max_examples=20, deadline=None)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle(case: str):
    """(inputs, with lists of numbers as tensors; the expected values)."""
    found = ORACLES[case]["inputs"]
    made = {name: tensor(value) if isinstance(value, list) else value for name, value in found.items()}
    for name in ("y", "labels"):
        if name in made:
            made[name] = made[name].long()
    return made, ORACLES[case]["expect"]


def flags(*rows: str) -> dict[str, torch.Tensor]:
    """flags("110", "011"): modality a is in rows 0 and 1, b in 1 and 2."""
    return {m: torch.tensor([c == "1" for c in row]) for m, row in zip("abc", rows, strict=False)}


def near(value: torch.Tensor, expected) -> None:
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def table(rows: torch.Tensor, valid=None) -> Table:
    return Table(rows, torch.ones(len(rows), dtype=torch.bool) if valid is None else torch.tensor(valid))


def term(name: str, forward: Any, options: Mapping[str, float | str]) -> torch.Tensor:
    """A registered term's loss of a forward pass, by these of its options."""
    choice = chosen("objective", {name: dict(options)})[0]
    return choice.bind(choice.method.loss)(forward)
