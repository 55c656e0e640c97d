"""Charts as Vega-Lite specs, each drawn for a wide and a narrow page, and their embedding in one HTML file.

A chart is data: what it shows can be read, and tested, without a browser. ``figure`` gives its static SVG, which prints
and needs no script, with the compiled spec beside it; ``script`` swaps in the interactive view of that same spec.
Colours become the page's CSS variables, dark or light; none stands alone: shape, dash, size or words say it too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from html import escape
from typing import Any, NamedTuple

from edgefl.console import safe_text

#: A Vega-Lite spec, or a piece of one.
Spec = dict[str, Any]
Values = list[dict[str, Any]]

#: Width of a chart in pixels, on a desk and on a phone.
WIDE, NARROW = 1080, 340
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
#: Name of a colour -> on a light page (and on paper), on a dark one. Told apart with any colour vision, and in grey
#: with the shapes and dashes that go with them (tests/report/test_palette.py); h0 to h4: from little to much.
PALETTE = {
    "ink": ("#1c2127", "#e8eaec"),
    "muted": ("#5d6671", "#a0a8b1"),
    "line": ("#d9dcdf", "#353b42"),
    "card": ("#ffffff", "#1b1f23"),
    "c1": ("#105ac6", "#5292ee"),
    "c2": ("#ad5a20", "#f88b33"),
    "c3": ("#1a815e", "#35df8e"),
    "c4": ("#c0189a", "#eeaeec"),
    "c5": ("#8a6d00", "#d9b84a"),
    "warn": ("#781111", "#f84552"),
    "h0": ("#e8f1f9", "#1f2d3a"),
    "h1": ("#bcd8ee", "#254a68"),
    "h2": ("#86b9dd", "#2c6b9a"),
    "h3": ("#4690c4", "#4c95cd"),
    "h4": ("#12609e", "#8cc6f2"),
}
INK, MUTED, LINE, PAPER, *SERIES, WARN = (PALETTE[name][0] for name in list(PALETTE)[:10])
BLUE, ORANGE, GREEN, PURPLE, OLIVE = SERIES
HEAT = tuple(PALETTE[f"h{n}"][0] for n in range(5))
#: Shapes of points and dashes of lines, in the order of ``SERIES``.
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
DASHES = ([1, 0], [5, 3], [2, 2], [8, 3, 2, 3], [1, 3])
_CONFIG: Spec = {
    "background": "transparent",
    "aria": False,  # the picture has one label of its own; one for each mark doubled the page
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "padding": {"left": 10, "right": 6, "top": 4, "bottom": 4},
    "view": {"stroke": None},
    "axis": {
        **{f"{name}Color": MUTED for name in ("label", "title")},
        **{f"{name}Color": LINE for name in ("domain", "tick", "grid")},
        **{f"{name}FontSize": 12 for name in ("label", "title")},
        "titleFontWeight": "normal",
        "labelLimit": 150,
    },
    "axisBand": {"grid": False},
    "legend": {"orient": "top", "title": None, "labelColor": INK, "labelFontSize": 12, "symbolStrokeWidth": 2},
    "header": {
        "title": None,
        "labelColor": INK,
        "labelFontSize": 12,
        "labelFontWeight": "bold",
        "labelAnchor": "start",
    },
    "text": {"color": INK, "fontSize": 11},
    "rule": {"color": LINE},
    "facet": {"spacing": 18},
}


class Chart(NamedTuple):
    """A chart: the spec for a width in pixels (``WIDE`` or ``NARROW``), a title, and one sentence on how to read it."""

    name: str
    title: str
    caption: str
    build: Callable[[int], Spec]

    def spec(self, width: int = WIDE) -> Spec:
        """The whole Vega-Lite spec, without what belongs to the page around it."""
        roomy = {"columnPadding": 10 if width <= NARROW else 34}  # a reader's letters may be a fifth wider
        spec: Spec = {
            "$schema": SCHEMA,
            "description": f"{self.title}. {self.caption}",
            "config": _CONFIG | {"legend": _CONFIG["legend"] | roomy},
        }
        spec.update(_drawable(self.build(width)))
        return spec


def _drawable(piece: Any) -> Any:
    """A piece of a spec without control characters, which crash vl-convert and this process."""
    if isinstance(piece, str):
        return safe_text(piece)
    if isinstance(piece, list):
        return [_drawable(one) for one in piece]
    return {name: _drawable(one) for name, one in piece.items()} if isinstance(piece, dict) else piece


def field(name: str, kind: str, title: str | None = None, **more: Any) -> Spec:
    """An encoding; ``kind``: Q (quantitative), N (nominal) or O (ordinal); ``title``: with the unit."""
    kinds = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}
    return {"field": name, "type": kinds[kind], "title": title, **more}


#: A chart of one view fills the width it is given, axes and labels included.
FILLS: Spec = {"autosize": {"type": "fit-x", "contains": "padding"}}


def label_room(names: Iterable[str]) -> float:
    """Pixels of the longest of these axis labels, with ticks and padding."""
    return min(150.0, 7.0 * max(map(len, names), default=0)) + 26


def tips(**titles: str) -> list[Spec]:
    """The tooltip of a mark: field -> its words."""
    return [{"field": name, "title": title.replace("_", " ")} for name, title in titles.items()]


def layer(mark: str, encoding: Spec, **more: Any) -> Spec:
    """One layer: a mark with its properties (``more``) and encoding; ``where`` filters, ``values`` is its own data."""
    found: Spec = {"mark": {"type": mark, **more}, "encoding": encoding}
    for name in ("where", "values"):
        if name in more:
            found |= {"transform": [{"filter": more[name]}]} if name == "where" else {"data": {"values": more[name]}}
            del found["mark"][name]
    return found


def scale(domain: Sequence[object], values: Sequence[object], **more: Any) -> Spec:
    """A discrete scale: each of ``domain`` to one of ``values``."""
    return {"domain": list(domain), "range": list(values)[: len(domain)], **more}


@lru_cache(maxsize=64)
def _drawn(text: str) -> str:
    """The SVG of a Vega-Lite spec (JSON)."""
    import vl_convert

    return vl_convert.vegalite_to_svg(text)


def _themed(text: str) -> str:
    """SVG or spec with palette colours replaced by the page's CSS variables."""
    for name, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{name})")
    return text


def variables(theme: int) -> str:
    """The palette as CSS variables; ``theme``: 0 light, 1 dark."""
    return " ".join(f"--{name}: {colours[theme]};" for name, colours in PALETTE.items())


def figure(chart: Chart, *, interactive: bool = True) -> str:
    """The chart as a <figure>: two static SVGs, of which a style sheet shows one, and both specs."""
    views, specs = [], {"wide": chart.spec(WIDE), "narrow": chart.spec(NARROW)}
    for name, spec in specs.items():
        prefix = f"{chart.name}-{name}-"
        svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', _themed(_drawn(json.dumps(spec))))
        svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)
        views.append(
            f'<div class="{name}" role="img" aria-label="{escape(chart.caption.replace("`", ""))}">{svg}</div>'
        )
    held = f'<script type="application/json">{_inert(specs)}</script>' if interactive else ""
    head = f"<h3>{escape(chart.title)}</h3><figcaption>{coded(chart.caption)}</figcaption>"
    return f'<figure id="{chart.name}">{head}{"".join(views)}{held}</figure>'


def coded(text: str) -> str:
    """The text as escaped HTML, with backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _inert(specs: Mapping[str, Spec]) -> str:
    """Both specs as JSON safe inside a <script>; shared rows of data are stored once."""
    wide, narrow = specs["wide"], specs["narrow"]
    shared = wide.get("data", {}).get("values") if wide.get("data") == narrow.get("data") else None
    if shared is not None:
        wide, narrow = ({name: piece for name, piece in spec.items() if name != "data"} for spec in (wide, narrow))
    text = json.dumps({"rows": shared, "wide": wide, "narrow": narrow}, separators=(",", ":"))
    return _themed(text).replace("<", "\\u003c")


@lru_cache(maxsize=1)
def script() -> str:
    """JavaScript of interactive charts with Vega-Lite (BSD-3): a page's last <script>."""
    from importlib.resources import files

    import vl_convert

    ours = (files("edgefl.report") / "templates" / "charts.js").read_text(encoding="utf-8")
    return vl_convert.javascript_bundle(ours).replace("</script", "<\\/script")


def allowed(script: str) -> str:
    """Value of ``script-src`` in a Content-Security-Policy: the script's hash, or none without a script."""
    if not script:
        return "'none'"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
