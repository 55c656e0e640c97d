"""Pictures of prepared samples: PNG, lines, and a heat map of labels."""

from __future__ import annotations

import base64
import io
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edgefl.data.arrays import Array
from edgefl.data.dataset import Dataset
from edgefl.report import units
from edgefl.report.charts import (
    DASHES,
    HEAT,
    INK,
    NARROW,
    PAPER,
    SERIES,
    Chart,
    Spec,
    Values,
    field,
    label_room,
    layer,
    scale,
    tips,
)
from edgefl.report.crowds import MANY

#: Classes, or spans of a numeric target, that have a column of their own.
LABELS, SPANS = 16, 8
OTHERS, NONE = "others", "no label"
#: Points of a line: what a panel of a third of the page has room for.
_POINTS = 240


class Example(NamedTuple):
    """A sample of a share: its row, and its label in words."""

    share: str
    row: int
    label: str


def label_word(data: Dataset, row: int) -> str:
    """The label of a sample, or the number of a numeric target, in words."""
    if data.targets is not None:
        return NONE if np.isnan(data.targets[row]) else units.number(float(data.targets[row]))
    return data.label_words(row) or NONE


def examples(shares: Mapping[str, Dataset], modality: str, most: int) -> list[Example]:
    """Example samples of a modality, from every label in turn and several shares."""
    found: dict[str, dict[str, list[Example]]] = {}
    for name, data in shares.items():
        for row in np.flatnonzero(data.has(modality)).tolist():
            label = label_word(data, row)
            rows = found.setdefault(label if data.targets is None else "", {}).setdefault(name, [])
            if len(rows) < most:
                rows.append(Example(name, row, label))
    turned = [(list(of.values()), k % len(of)) for k, (_, of) in enumerate(sorted(found.items()))]
    return _in_turn([_in_turn(rows[k:] + rows[:k]) for rows, k in turned])[:most]


def _in_turn(lists: Sequence[Sequence[Example]]) -> list[Example]:
    return [one for group in itertools.zip_longest(*lists) for one in group if one is not None]


def png(pixels: Array) -> str:
    """A picture [height, width, 1 or 3] of 0..1 as the address of an <img>. Needs Pillow."""
    from PIL import Image

    depth = np.round(255 * np.clip(pixels, 0, 1)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(depth[:, :, 0] if depth.shape[2] < 3 else depth[:, :, :3]).save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def spectrogram(levels: Array) -> Array:
    """Spectrogram [frames, bands] as a colour picture [bands, frames, 3]: time to the right, low bands below."""
    low, high = float(levels.min()), float(levels.max())
    share = (levels.T[::-1] - low) / ((high - low) or 1.0) * (len(HEAT) - 1)
    colours = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in HEAT]) / 255
    below = np.minimum(share.astype(np.int64), len(HEAT) - 2)
    rest = (share - below)[:, :, None]
    picture: Array = colours[below] * (1 - rest) + colours[below + 1] * rest
    return picture


def lines(modality: str, samples: Mapping[str, Array], channels: Sequence[str], rate: float, caption: str) -> Chart:
    """Line chart of recordings [time, channels]: a panel per sample; ``samples``: panel title -> values."""
    shown = list(channels)[: len(SERIES)]
    values: Values = []
    for words, array in samples.items():
        step = -(-len(array) // _POINTS)
        for at in range(0, len(array), step):
            time = round(at / rate, 4) if rate else at
            values += [
                {"of": words, "t": time, "channel": name, "v": float(f"{array[at, c]:.5g}")}
                for c, name in enumerate(shown)
            ]

    def build(width: int) -> Spec:
        columns = 1 if width == NARROW else 3
        look = {
            "color": field("channel", "N", scale=scale(shown, SERIES), sort=shown),
            "strokeDash": field("channel", "N", scale=scale(shown, DASHES), sort=shown),
        }
        if len(shown) == 1:
            look = {name: {**one, "legend": None} for name, one in look.items()}
        x = field("t", "Q", "s" if rate else "time steps", scale={"nice": False}, axis={"tickCount": 4})
        y = field("v", "Q", None, scale={"zero": False}, axis={"tickCount": 4})
        return {
            "data": {"values": values},
            "facet": field("of", "N", sort=list(samples)),
            "columns": columns,
            "spec": {
                "width": (width - 60) // columns - 44,
                "height": 90,
                **layer("line", {"x": x, "y": y, **look, "tooltip": tips(of="sample", channel="channel", v="value")}),
            },
        }

    return Chart(f"lines-{modality}", f"Samples of {modality}", caption, build)


def label_counts(shares: Mapping[str, Dataset]) -> Mapping[str, Counter[str]]:
    """Share -> number of samples by label; of a numeric target by its quantile ranges."""
    first = next(iter(shares.values()))
    if first.targets is None:
        counts = {name: Counter(label_word(data, row) for row in range(len(data))) for name, data in shares.items()}
        total: Counter[str] = sum(counts.values(), Counter())
        kept = {label for label, _ in total.most_common(LABELS)} | {NONE}
        return {
            name: Counter(label if label in kept else OTHERS for label in count.elements())
            for name, count in counts.items()
        }
    every = np.concatenate([data.targets for data in shares.values() if data.targets is not None])
    edges = np.unique(np.nanquantile(every, np.linspace(0, 1, SPANS + 1)))
    names = [f"{units.number(a)} to {units.number(b)}" for a, b in itertools.pairwise(edges.tolist())]
    return {
        name: Counter(
            NONE if np.isnan(value) else names[min(int(np.searchsorted(edges, value, "right")) - 1, len(names) - 1)]
            for value in (np.full(len(data), np.nan) if data.targets is None else data.targets)
        )
        for name, data in shares.items()
    }


def labels(shares: Mapping[str, Dataset]) -> Chart | None:
    """Heat map of sample counts by label and share; None without labels."""
    if all(data.labels is None for data in shares.values()):
        return None
    counts = label_counts(shares)
    total: Counter[str] = sum(counts.values(), Counter())
    numeric = next(iter(shares.values())).targets is not None
    order = [label for label, _ in total.most_common() if label not in {OTHERS, NONE}]
    if numeric:
        order.sort(key=lambda span: float(span.partition(" to ")[0].replace(",", "")))
    order += [label for label in (OTHERS, NONE) if total[label]]
    named = list(counts)[:MANY]
    largest = max(max(count.values(), default=0) for count in counts.values())
    values: Values = [
        {"share": name, "label": label, "n": counts[name][label], "level": min(4, 5 * counts[name][label] // largest)}
        for name in named
        for label in order
    ]

    def build(width: int) -> Spec:
        x, y = field("label", "N", sort=order), field("share", "N", sort=named)
        if width == NARROW:  # labels need the room of lines
            x, y = y, x
        across, down = (named, order) if width == NARROW else (order, named)
        step = (width - label_room(down)) / len(across)
        x["axis"] = {"orient": "top", "labelAngle": -35 if 8 * max(map(len, across)) > step else 0}
        heat = field("level", "O", legend=None, scale=scale(range(5), HEAT))
        dark = {"condition": {"test": "datum.level > 2", "value": PAPER}, "value": INK}
        return {
            "data": {"values": values},
            "width": {"step": step},
            "height": {"step": 24},
            "layer": [
                layer("rect", {"x": x, "y": y, "color": heat}, stroke=PAPER),
                layer("text", {"x": x, "y": y, "text": {"field": "n"}, "color": dark}, fontSize=10.5),
            ],
        }

    caption = "Samples of each label by device, and of the test set. Stronger colour is more."
    caption += f" The first {MANY} of {len(counts)} shares." if len(counts) > MANY else ""
    return Chart("labels", "Who has what", caption, build)
