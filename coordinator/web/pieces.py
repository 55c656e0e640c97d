"""The pieces of the live page as HTML: each is sent again only when it changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NamedTuple

import jinja2
import msgspec

from coordinator.web.snapshot import GROUP_OF, GROUPS, Curve, DeviceView, Snapshot
from edgefl.report import units
from edgefl.report.events import WORDS

#: Pieces that change while a run goes on, in the page's order.
PIECES = ("head", "now", "fleet", "curves", "refusals", "log", "downloads")
#: Devices shown at first, and at most; all are counted, and any is found by its name.
FEW, MOST = 24, 500
#: Seconds that a time axis may span at most, and of those it grows by: at most a hundredth of it, if not less than one.
_LONGEST = 3600.0
_STEPS = (1, 2, 5, 10, 20, 30, 60)


class View(NamedTuple):
    """A browser's filter of devices: group, part of the name (``find``), number of rows."""

    show: str = ""
    find: str = ""
    rows: int = FEW

    @classmethod
    def of(cls, query: Mapping[str, str]) -> View:
        """Parse a view from a URL query; invalid values become defaults."""
        show, rows = query.get("show", ""), query.get("rows", "")
        few = MOST if rows == "all" else FEW
        return cls(show if show in GROUPS else "", query.get("find", "")[:64].lower(), few)

    def chosen(self, snapshot: Snapshot) -> list[DeviceView]:
        """Devices matching the filter; those at work first if there are more than ``rows``."""
        found = [d for d in snapshot.devices if self.show in ("", d.group) and self.find in d.name.lower()]
        order = list(GROUPS)
        return sorted(found, key=lambda d: order.index(d.group)) if len(found) > self.rows else found


class Axis(NamedTuple):
    """Time axis of the page's plots, up to now; seconds since the epoch."""

    begin: float
    length: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> Axis:
        """The axis for a snapshot: from the run's begin, or the last hour from a full five minutes."""
        begin = snapshot.began_at or snapshot.at
        now = begin + snapshot.elapsed_s
        if now - begin > _LONGEST:
            begin = math.ceil((now - _LONGEST) / 300) * 300
        step = next((step for step in _STEPS if now - begin <= 100 * step), _STEPS[-1])
        return cls(begin, max(1.0, math.ceil((now - begin) / step) * step))

    def at(self, moment: float) -> float:
        """x of a moment, 0 to 1000."""
        return round(1000 * min(1.0, max(0.0, (moment - self.begin) / self.length)), 1)

    def bars(self, device: DeviceView) -> list[tuple[float, float, str, str]]:
        """(x, width, group, activity) of each span of a device's time."""
        ends = [*(at for at, _ in device.spans[1:]), self.begin + self.length]
        edges = [(self.at(at), self.at(end), doing) for (at, doing), end in zip(device.spans, ends, strict=False)]
        return [(a, round(b - a, 1), GROUP_OF.get(doing, "waiting"), doing) for a, b, doing in edges if b > a]

    def layers(self, snapshot: Snapshot) -> list[tuple[str, str]]:
        """(group, SVG path) of the stacked numbers of devices by activity over time, 100 high."""
        total = max((sum(counts) for _, counts in snapshot.history), default=0) or 1
        moments = [*snapshot.history, (self.begin + self.length, snapshot.history[-1][1])] if snapshot.history else []
        paths = []
        for index, group in enumerate(GROUPS):
            upper, lower = [], []
            for number, (at, counts) in enumerate(moments):
                ends = [self.at(at), self.at(moments[min(number + 1, len(moments) - 1)][0])]
                low, high = (100 - 100 * sum(counts[:upto]) / total for upto in (index, index + 1))
                upper += [f"{x:g},{high:.1f}" for x in ends]
                lower += [f"{x:g},{low:.1f}" for x in ends]
            if upper != lower:
                paths.append((group, "M" + "L".join([*upper, *reversed(lower)]) + "Z"))
        return paths

    def ticks(self) -> list[tuple[float, str]]:
        """(x, words) of five marks."""
        moments = [self.begin + self.length * part / 4 for part in range(5)]
        return [(250.0 * part, clock(moment)) for part, moment in enumerate(moments)]


def clock(at: float) -> str:
    """Local time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


class Plot(msgspec.Struct, frozen=True):
    """Curves of one metric as the page's script draws them; a line is its label and its points (x, y, y in words)."""

    title: str
    unit: str
    lines: tuple[tuple[str, tuple[tuple[int, float, str], ...]], ...]


def plots(snapshot: Snapshot) -> list[Plot]:
    """A plot for each metric, the loss last; shares in percent."""
    by_metric: dict[str, list[Curve]] = {}
    for curve in snapshot.curves:
        by_metric.setdefault(curve.metric, []).append(curve)
    found = []
    for metric, curves in sorted(by_metric.items(), key=lambda item: item[0] == "loss"):
        scale, lines = 100.0 if units.is_share(metric) else 1.0, []
        for one in curves:
            label = f"{one.given}, {one.mask} mask" if one.mask else one.given
            label = f"test, {label}" if metric == "loss" and one.given != "training" else label
            lines.append((label, tuple((x, round(scale * y, 4), units.score(metric, y)) for x, y in one.points)))
        found.append(Plot(metric.replace("_", " "), "%" if units.is_share(metric) else "", tuple(lines)))
    return found


class Card(NamedTuple):
    """One headline number."""

    label: str
    value: str
    detail: str


def cards(snapshot: Snapshot) -> list[Card]:
    """The headline numbers: latest scores, devices at work, total costs."""
    found = []
    for plot in plots(snapshot):
        label, points = plot.lines[0]
        last, _, best = points[-1]
        found.append(Card(plot.title, best, f"{label}, round {last}"))
    simple = snapshot.reference
    if simple.scores:
        name = max(simple.scores, key=lambda one: simple.scores[one])
        words = f"{name}, on the same samples"
        found = [*found[:2], Card("best simple model", units.score(simple.metric, simple.scores[name]), words)]
    every = snapshot.devices
    at_work = sum(snapshot.counts.get(group, 0) for group in ("training", "receiving", "sending"))
    sent, received = sum(d.sent_bytes for d in every), sum(d.received_bytes for d in every)
    peaks = [d.step_peak_bytes for d in every if d.step_peak_bytes is not None]
    flops = [d.flops for d in every if d.flops is not None]
    energy = [d.energy_j for d in every if d.energy_j is not None]
    return [
        *found[:3],
        Card("devices at work", f"{at_work} of {len(every)}", f"{snapshot.counts.get('away', 0)} away"),
        Card("payload", units.mib(sent), f"sent; received {units.mib(received)}"),
        Card("largest step memory", units.mib(max(peaks, default=None)), "of any device in a round"),
        Card("FLOPs", units.gflop(sum(flops) if flops else None), "all devices, forward and backward"),
        *([Card("energy", units.quantity(sum(energy), "J"), "of devices that measure it")] if energy else []),
    ]


def environment() -> jinja2.Environment:
    """The templates, with everything escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("coordinator.web", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"seconds": units.whole_seconds, "clock": clock, "number": units.number}
    made.globals |= {"groups": tuple(GROUPS), "quantity": units.quantity, "words": WORDS}
    return made


class Pieces:
    """Renderer of the page's pieces, cached by snapshot and view. ``downloads``: current file names."""

    def __init__(self, *, control: bool, downloads: Callable[[], list[str]]) -> None:
        self._downloads = downloads
        self._environment = environment()
        self._control = control
        self._made: dict[tuple[str, View], str] = {}
        self._number = -1

    def page(self, snapshot: Snapshot, view: View, *, acts: bool) -> str:
        """The whole page. ``acts``: this browser may act."""
        pieces = self.all(snapshot, view)
        template = self._environment.get_template("page.html.j2")
        control = self._control
        return template.render(s=snapshot, view=view, pieces=pieces, acts=acts, control=control, most=MOST)

    def all(self, snapshot: Snapshot, view: View) -> dict[str, str]:
        """Piece's name -> HTML for this snapshot and view."""
        if snapshot.number != self._number:
            self._number, self._made = snapshot.number, {}
        return {name: self._piece(name, snapshot, view) for name in PIECES}

    def _piece(self, name: str, snapshot: Snapshot, view: View) -> str:
        key = (name, view if name == "fleet" else View())
        if key not in self._made:
            chosen = view.chosen(snapshot) if name == "fleet" else []
            self._made[key] = self._environment.get_template(f"{name}.html.j2").render(
                s=snapshot,
                view=view,
                axis=Axis.of(snapshot),
                chosen=chosen[: view.rows],
                left=len(chosen) - view.rows,
                control=self._control,
                cards=cards(snapshot) if name == "now" else [],
                downloads=self._downloads() if name == "downloads" else [],
                plots=[msgspec.json.encode(plot).decode() for plot in plots(snapshot)] if name == "curves" else [],
            )
        return self._made[key]
