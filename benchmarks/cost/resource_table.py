"""The table and the plot of ``benchmarks.cost.resources``."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.plotting import COLOURS, plot
from benchmarks.cost.device_pages import elsewhere, page_name, title

if TYPE_CHECKING:
    from benchmarks.cost.resources import Row

MIB = 2**20
ABOUT = """ViT-Tiny/16 at 224 px and DistilBERT at text length 40, heads of width 4096, CLIP, random weights (the model
of LW-FedMML, arXiv 2407.15426); the last of six stages, where progressive training is end-to-end training. Each row is
a process of its own, with the allocator of a trainer. Step memory is what training adds to the idle process, FLOPs are
forward and backward as run, 2 per multiply-accumulate; over 90 rounds of one epoch, which the schedules spread over
their stages, they are traced, with what it takes to fill the store of frozen prefixes. Bytes are those of a device over
the 90 rounds. Ratios are against end-to-end training."""
HEAD = (
    "| | step memory, MiB | predicted | process, MiB | GFLOP a sample | predicted | GFLOP a sample, 90 rounds "
    "| MiB, 90 rounds | s a step | ÷ memory | ÷ FLOPs | ÷ FLOPs, 90 rounds | ÷ bytes | ÷ seconds |"
)
#: What each setting is to reach against end-to-end training in batches of 256: ratio of memory, FLOPs, bytes, seconds.
GOALS = {"fast": (5.0, 5.5, 10.0, 8.0), "small": (10.0, 4.0, 10.0, 6.0), "leanest": (60.0, 15.0, 100.0, 10.0)}
GOAL_BATCH = 256


def write_page(rows: Sequence[Row], device: str, threads: str, folder: Path | None) -> str:
    """Markdown; with ``folder`` also written there as resources.md, with its plot beside it."""
    command = "python -m benchmarks.cost.resources" + ("" if device == "cpu" else f" --device {device}")
    lines = [
        title("Resources of one training step", device),
        "",
        ABOUT,
        "",
        f"Made by `{command}` on {platform.machine()}, {threads} threads, device {device}.",
    ]
    lines += elsewhere("resources", device)
    for batch in sorted({row.batch for row in rows}):
        lines += ["", *_table([row for row in rows if row.batch == batch])]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        plot = page_name("resources", device, "svg")
        _plot(rows, folder / plot)
        lines += ["", f"![Step memory against FLOPs of each row]({plot})"]
        (folder / page_name("resources", device)).write_text("\n".join(lines) + "\n")
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    lines = [
        f"## Batches of {first.batch}",
        "",
        HEAD,
        "|" + "---|" * 14,
    ]
    for row in rows:
        step, process = (figure.value or 0.0 for figure in (row.step_peak, row.process_peak))
        ratios = [
            (first.step_peak.value or 0.0) / step,
            first.flops_per_sample / row.flops_per_sample,
            first.run_flops / row.run_flops,
            first.payload_bytes / row.payload_bytes,
            first.seconds / row.seconds,
        ]
        cells = [
            row.setting.name,
            f"{step / MIB:,.0f}",
            f"{row.predicted_peak / step - 1:+.0%}",
            f"{process / MIB:,.0f}",
            f"{row.flops_per_sample / 1e9:.2f}",
            f"{row.predicted_flops / row.flops_per_sample - 1:+.1%}",
            f"{row.run_flops / 1e9:,.0f}",
            f"{row.payload_bytes / MIB:,.0f}",
            f"{row.seconds:.{2 if row.seconds >= 1 else 3}f}",
            *(f"{ratio:.1f}" for ratio in ratios),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for name, goal in GOALS.items() if first.batch == GOAL_BATCH else ():
        own = next((row for row in rows if row.setting.name.endswith(f"= {name}")), None)
        if own is not None:
            lines += ["", _judged(name, goal, first, own)]
    filled = next((row for row in rows if row.cache_fill_flops), None)
    if filled is not None:
        cost = f"{filled.cache_fill_flops / 1e9:.2f} GFLOP a sample"
        lines += ["", f"Storing the prefix for this stage: {cost}, once, from what the stage before has stored."]
    return lines


def _judged(name: str, goal: Sequence[float], first: Row, own: Row) -> str:
    """Whether a setting reaches its goal, figure by figure."""
    found = (
        (first.step_peak.value or 0.0) / (own.step_peak.value or 1.0),
        first.flops_per_sample / own.flops_per_sample,
        first.payload_bytes / own.payload_bytes,
        first.seconds / own.seconds,
    )
    words = [
        f"{what} ÷ {ratio:.1f} (goal {least:g}{'' if ratio >= least else ', missed'})"
        for what, ratio, least in zip(("memory", "FLOPs", "bytes", "seconds"), found, goal, strict=True)
    ]
    return f"Setting {name}: {', '.join(words)}."


def _plot(rows: Sequence[Row], path: Path) -> None:
    with plot(path, "GFLOP a sample (numbers: the rows of the table)", "step memory, MiB") as axes:
        for batch, marker, colour in zip(sorted({row.batch for row in rows}), "osD^", COLOURS, strict=False):
            own = [row for row in rows if row.batch == batch]
            places = [(row.flops_per_sample / 1e9, (row.step_peak.value or 0.0) / MIB) for row in own]
            axes.plot(*zip(*places, strict=True), color=colour, marker=marker, linewidth=1, label=f"batches of {batch}")
            for i, place in enumerate(places):
                apart = [max(abs(log(a / b)) for a, b in zip(place, other, strict=True)) for other in places[:i]]
                offset = (-10, -10) if min(apart, default=1.0) < 0.15 else (6, 4)  # numbers of neighbours on both sides
                axes.annotate(str(i + 1), place, textcoords="offset points", xytext=offset, fontsize=8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = [1, 2, 5, 10, 20], [200, 500, 1000, 2000, 5000, 10000]
        axes.set_xticks(ticks[0], [str(t) for t in ticks[0]])
        axes.set_yticks(ticks[1], [f"{t:,}" for t in ticks[1]])
        axes.minorticks_off()
        axes.legend()
