"""The README's picture: memory of a training process under each setting, against a device's budget.

``python docs/first_picture.py`` draws docs/images/memory.svg from the figures of docs/results/resources.md (batches of
256) and the budget of the profile raspberry-pi-5.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common.plotting import COLOURS, plot  # noqa: E402  # found by the line above
from edgefl.config.profiles import load_device  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "memory.svg"
#: First words of a row of the page -> the bar's label.
ROWS = {
    "end-to-end": "end to end",
    "layer-wise": "layer-wise",
    "+ stored prefix": "+ stored prefix,\npooled tokens, 4 bits",
    "+ micro-batches of 32": "+ micro-batches",
    "LoRA": "+ LoRA, weights\non disk",
}
PROFILE = "raspberry-pi-5"


def figures() -> dict[str, int]:
    """Peak memory of the training process by bar, MiB."""
    text = (ROOT / "docs" / "results" / "resources.md").read_text(encoding="utf-8")
    found: dict[str, int] = {}
    for table in text.split("## Batches of 256")[1:]:  # the newest comes first
        rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")]
        found = {row[1].strip(): int(row[4].replace(",", "")) for row in rows[1:]} | found
    return {label: next(mib for name, mib in found.items() if name.startswith(begin)) for begin, label in ROWS.items()}


def draw(path: Path) -> None:
    """One bar a setting, and the budget as a line."""
    known, budget = figures(), (load_device(PROFILE).budget.memory_bytes or 0) / 2**20
    with plot(path, "memory of the training process, MiB", "", height=2.6) as axes:
        colours = [COLOURS[0] if mib <= budget else COLOURS[6] for mib in known.values()]
        bars = axes.barh(list(known), list(known.values()), color=colours, height=0.62)
        axes.axvline(budget, color=COLOURS[1], linewidth=1.5)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.bar_label(bars, [f"{mib:,}" for mib in known.values()], padding=4, bbox=box)
        axes.annotate(
            f"budget in profile {PROFILE}: {budget:,.0f} MiB", (budget, 2), (budget + 1500, 2.2), color=COLOURS[1],
            arrowprops={"arrowstyle": "-", "color": COLOURS[1]},
        )  # fmt: skip
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlim(0, 1.1 * max(known.values()))


def texts(path: Path) -> list[str]:
    """The words and numbers of a picture."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    draw(PICTURE)
