"""HTML page of a run's data: prepared samples of each modality, and counts by device."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edgefl.data.arrays import Array, Rows, chosen
from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import plain_names
from edgefl.label_spaces import spaces_in
from edgefl.models.spec import EncoderSpec
from edgefl.records import TableColumn
from edgefl.report import units
from edgefl.report.charts import Chart
from edgefl.report.data_pictures import (
    NONE,
    Example,
    examples,
    label_counts,
    label_word,
    labels,
    lines,
    png,
    spectrogram,
)
from edgefl.report.grid import Column, Grid, table
from edgefl.report.pages import page

#: Samples of a modality that are shown: pictures, panels of lines, and rows of texts.
PICTURES, PANELS, TEXTS = 24, 6, 12
#: Samples of a share that tell about a table's columns.
_LOOKED_AT = 20_000
#: Values of a category, ids of a text and letters of it that are shown.
_VALUES, _IDS, _LETTERS = 4, 8, 160


class Data(NamedTuple):
    """Data of a run, as its report shows them.

    ``shares``: device -> samples; ``text``: (modality, sample's id) -> its text, "" when not known.
    """

    name: str
    shares: Mapping[str, Dataset]
    test: Dataset
    encoders: Mapping[str, EncoderSpec]
    text: Callable[[str, str], str] = lambda modality, sample: ""
    skipped: Sequence[str] = ()

    @property
    def every(self) -> dict[str, Dataset]:
        """The shares and the test set by name."""
        return {**self.shares, "test set": self.test}


class Section(NamedTuple):
    """Section of the page on a modality. ``pictures``: (address, caption, sample's id); ``wide``: spectrograms."""

    title: str
    facts: str
    pictures: Sequence[tuple[str, str, str]] = ()
    wide: bool = False
    chart: Chart | None = None
    grids: Sequence[Grid] = ()


def to_html(data: Data, tables: Sequence[Grid]) -> str:
    """The page, without scripts. ``tables``: of the shares. Needs the extra ``coordinator``."""
    first = labels(data.every)
    sections = [_section(data, m) for m in data.encoders if any(m in share.modalities for share in data.every.values())]
    charts = [chart for chart in (first, *(section.chart for section in sections)) if chart is not None]
    return page(
        "data.html.j2",
        charts,
        title=f"{data.name} · EdgeFL data",
        facts=[data.name, f"{sum(map(len, data.shares.values())):,} samples to train on", *_facts(data)],
        headline=headline(data),
        remarks=list(remarks(data)),
        counted=first is not None,
        sections=sections,
        tables=tables,
    )


def _facts(data: Data) -> Iterator[str]:
    yield f"{len(data.test):,} held out for the test"
    yield f"{len(data.shares)} devices"
    if data.test.targets is None and data.test.label_names:
        yield f"{len(data.test.label_names)} labels"


def headline(data: Data) -> str:
    """Sentence on top: target, modalities, and balance of the labels."""
    given = " and ".join([", ".join(list(data.encoders)[:-1])] * (len(data.encoders) > 1) + [list(data.encoders)[-1]])
    if all(share.labels is None for share in data.every.values()):
        return f"No sample of {given} has a label."
    if data.test.targets is not None:
        every = np.concatenate([share.targets for share in data.every.values() if share.targets is not None])
        low, middle, high = (units.number(float(x)) for x in np.nanquantile(every, (0, 0.5, 1)))
        return f"A number from {low} to {high}, {middle} in the median, is learned from {given}."
    several = data.test.sets is not None
    counts: Counter[str] = sum((label_counts({name: share})[name] for name, share in data.shares.items()), Counter())
    del counts[NONE]
    if not counts:
        return f"No sample of {given} that is trained on has a label."
    labelled = counts.total()
    if several:  # counted by label: a sample is of each of its own
        names = plain_names(data.test.label_names)
        counts = Counter(
            dict(zip(names, np.sum([s.class_counts() for s in data.shares.values()], axis=0), strict=True))
        )
    name, most = counts.most_common(1)[0]
    share = units.percent(most / labelled).replace(" ", "\N{NO-BREAK SPACE}")
    whole = "on {} of the samples" if several else "{} of them"
    return (
        f"{len(data.test.label_names)} labels are learned from {given}; the most frequent, {name}, is "
        f"{whole.format(share)}."
    )


def remarks(data: Data) -> Iterator[str]:
    """Faults of the data, as sentences."""
    if data.skipped:
        yield f"Left out, in {len(data.skipped)} places; the first: {data.skipped[0]}"
    if data.test.targets is None:
        names = plain_names(data.test.label_names)
        set_of = {c: name for name, places in spaces_in(data.test.label_names).items() for c in places}
        for name, share in list(data.shares.items())[:3]:
            counts = share.class_counts()[: len(names)]
            own = {set_of.get(c) for c, n in enumerate(counts) if n} or {None}
            lacking = [names[c] for c, n in enumerate(counts) if not n and set_of.get(c) in own]
            if lacking and share.labels is not None:
                yield f"{name} has no sample of {', '.join(lacking[:5])}{' and others' if len(lacking) > 5 else ''}."
    for m in data.encoders:
        having = sum(int(share.has(m).sum()) for share in data.shares.values())
        total = sum(map(len, data.shares.values()))
        if having < total:
            yield f"{units.percent(1 - having / total)} of the samples that are trained on have no {m}."


def _section(data: Data, m: str) -> Section:
    encoder = data.encoders[m]
    some = examples(data.every, m, PICTURES)
    shape = next(share.signature()[m] for share in data.every.values() if m in share.signature())
    return {"vision": _pictures, "audio": _sounds, "text": _texts, "table": _table}.get(encoder.kind, _sensor)(
        data, m, some, shape
    )


def _value(data: Data, m: str, one: Example) -> Array:
    value: Array = np.asarray(chosen(data.every[one.share].modalities[m], np.array([one.row])))[0]
    return value


def _words(one: Example) -> str:
    return f"{one.label} · {one.share}"


def _pictures(data: Data, m: str, some: Sequence[Example], shape: Sequence[int]) -> Section:
    height, width, channels = (*shape, 1)[:3]
    arrays = [_value(data, m, one) for one in some]
    low, high = min(float(a.min()) for a in arrays), max(float(a.max()) for a in arrays)
    beyond = low < 0 or high > 1
    colours = {1: "grey", 3: "coloured"}.get(channels, f"of {channels} channels")
    facts = f"Pictures of {height} × {width} pixels, {colours}, as prepared"
    facts += f"; values from {units.number(low)} to {units.number(high)}, drawn from black to white." if beyond else "."
    scaled = [(a - low) / ((high - low) or 1.0) for a in arrays] if beyond else arrays
    return Section(m, facts, [(png(a), _words(one), _id(data, one)) for a, one in zip(scaled, some, strict=True)])


def _sounds(data: Data, m: str, some: Sequence[Example], shape: Sequence[int]) -> Section:
    facts = (
        f"Spectrograms of {shape[0]} frames, to the right, and {shape[1]} mel bands, upwards, as prepared; each from "
    )
    facts += "its quietest to its loudest."
    drawn = [(png(spectrogram(_value(data, m, one))), _words(one), _id(data, one)) for one in some[: PICTURES // 2]]
    return Section(m, facts, drawn, wide=True)


def _sensor(data: Data, m: str, some: Sequence[Example], shape: Sequence[int]) -> Section:
    encoder, (steps, channels) = data.encoders[m], (*shape, 1)[:2]
    named = [column.name for column in encoder.columns]
    names = named if len(named) == channels else [str(c) for c in range(channels)]
    samples = {
        f"{_words(one)} · {_id(data, one)[-16:]}": _value(data, m, one).reshape(steps, -1) for one in some[:PANELS]
    }
    lasting = f", {units.number(steps / encoder.rate)} s at {encoder.rate:g} Hz" if encoder.rate else ""
    caption = f"Each panel is a sample: {steps} time steps{lasting}, {channels} channels, in the data's own units."
    caption += " The first five channels are drawn." if channels > 5 else ""
    return Section(m, _scaled(encoder), chart=lines(m, samples, names, encoder.rate, caption))


def _scaled(encoder: EncoderSpec) -> str:
    """Standardisation of the values, as a sentence."""
    each = "column" if encoder.kind == "table" else "channel"
    if encoder.standardize == "fleet":
        return f"The model takes each {each} less its mean, over its deviation, of all devices together."
    return "The model takes the values as they are."


def _texts(data: Data, m: str, some: Sequence[Example], shape: Sequence[int]) -> Section:
    bag = data.encoders[m].arch == "bag"
    what = "words and their n-grams" if bag else "tokens"
    rows = [(one, _value(data, m, one)) for one in some[:TEXTS]]
    cut = [int((np.asarray(share.modalities[m])[share.has(m)][:, -1] != 0).sum()) for share in _having(data, m)]
    total = sum(int(share.has(m).sum()) for share in _having(data, m))
    facts = f"{shape[0]} {what} of each text are taken, as numbers below {data.encoders[m].vocabulary:,}; 0 pads."
    facts += f" {units.percent(sum(cut) / total)} of the texts fill all places, and may be cut." if sum(cut) else ""

    def text(row: tuple[Example, Array]) -> str:
        words = data.text(m, _id(data, row[0]))
        return words if len(words) <= _LETTERS else f"{words[:_LETTERS]}…"

    columns: list[Column[tuple[Example, Array]]] = [
        Column("text", text, text=True) if any(map(text, rows)) else Column("id", lambda row: _id(data, row[0])),
        Column("label", lambda row: row[0].label, text=True),
        Column("of", lambda row: row[0].share, text=True),
        Column("tokens", lambda row: f"{int((row[1] != 0).sum())} of {shape[0]}"),
        Column("as numbers", lambda row: " ".join(map(str, row[1][:_IDS].tolist())) + " …", text=True),
    ]
    return Section(m, facts, grids=[table(f"Texts of {m}", columns, rows)])


def _id(data: Data, one: Example) -> str:
    return data.every[one.share].ids[one.row]


def _having(data: Data, m: str) -> list[Dataset]:
    return [share for share in data.every.values() if m in share.signature()]


def _table(data: Data, m: str, some: Sequence[Example], shape: Sequence[int]) -> Section:
    rows: list[Rows] = [chosen(s.modalities[m], np.flatnonzero(s.has(m))[:_LOOKED_AT]) for s in _having(data, m)]
    cells = np.concatenate([np.asarray(one) for one in rows])  # [N, columns, 2]
    known = data.encoders[m].columns or tuple(TableColumn(str(c)) for c in range(shape[0]))
    each = [(column, cells[cells[:, c, 1] > 0.5, c, 0]) for c, column in enumerate(known)]
    columns: list[Column[tuple[TableColumn, Array]]] = [
        Column("column", lambda row: row[0].name, key=True, text=True),
        Column("kind", lambda row: row[0].kind, text=True),
        Column("unit", lambda row: row[0].unit if row[0].kind == "number" else "", text=True),
        Column("missing", lambda row: units.percent(1 - len(row[1]) / len(cells)) if len(row[1]) < len(cells) else "0"),
        Column("values", lambda row: _values(*row), text=True),
    ]
    grids = [table(f"Columns of {m}", columns, each).filled(), _few_rows(data, m, known, some)]
    return Section(m, f"{len(cells):,} rows of {len(known)} columns. {_scaled(data.encoders[m])}", grids=grids)


def _values(column: TableColumn, values: Array) -> str:
    """Summary of a column's values: shares of a category's, else minimum, median and maximum."""
    if not len(values):
        return "none"
    if column.kind == "category":
        counts = Counter(column.values[int(code)] for code in values).most_common()
        listed = ", ".join(f"{name} {100 * n / len(values):.0f} %" for name, n in counts[:_VALUES])
        return listed + (f" and {len(counts) - _VALUES} more" if len(counts) > _VALUES else "")
    low, middle, high = (_cell(column, float(x)) for x in np.quantile(values, (0, 0.5, 1)))
    return f"{low} to {high}, {middle} in the median"


def _cell(column: TableColumn, value: float) -> str:
    if column.kind == "date":
        return str((dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(days=value)).date())
    return column.values[int(value)] if column.kind == "category" else units.number(value)


def _few_rows(data: Data, m: str, known: Sequence[TableColumn], some: Sequence[Example]) -> Grid:
    """Table of some example rows of a tabular modality."""

    def column(c: int) -> Column[Example]:
        def cell(one: Example) -> str:
            value, there = _value(data, m, one)[c].tolist()
            return _cell(known[c], value) if there > 0.5 else units.NOTHING

        return Column(known[c].name, cell, text=known[c].kind == "category")

    ends: list[Column[Example]] = [
        Column("label", lambda one: label_word(data.every[one.share], one.row), key=True, text=True),
        Column("of", lambda one: one.share, text=True),
    ]
    return table(f"Rows of {m}", [*ends, *map(column, range(min(len(known), 12)))], some[:TEXTS])
