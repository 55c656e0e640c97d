"""Summary of a run in one sentence, and its faults, a sentence each."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from edgefl.records import EvaluationRow, Figure
from edgefl.report import decisions, quality, resources, rounds, units
from edgefl.report.attendance import attendance
from edgefl.report.totals import totals
from edgefl.report.waits import Wait, waits
from edgefl.run_records import Reference, RoundRow, RunReport

_PARTS = ("", "", "half", "a third", "a quarter", "a fifth", "a sixth", "a seventh", "an eighth", "a ninth", "a tenth")


#: Totals of the sentence -> their words behind a number, or in place of one.
_IN_ALL = {
    "step_peak_bytes": "of step memory at most",
    "flops": "FLOPs",
    "payload_bytes": "of payload",
    "energy_j": "joules",
}
#: Devices that missed rounds and are named in the sentence.
_NAMED = 2
#: Share of a score that a run may lie below a simple model, by the model's name; of others ``_LITTLE``.
_ADMITTED, _LITTLE = {"forest": 0.03}, 0.01
#: Loss of the last quarter of a stage's rounds over that of the quarter before, below which more rounds may help.
_FELL = 0.97
#: Share of a score that later stages may lose without a word.
_LOST = 0.03


class Saving(NamedTuple):
    """A cost over all devices: spent, predicted, and predicted for the same rounds end to end."""

    name: str
    unit: str
    spent: float
    predicted: float | None
    end_to_end: float


def savings(report: RunReport) -> list[Saving]:
    """Savings in step memory (peak), FLOPs and bytes (mean round), for devices with an end-to-end price."""
    rows = [row for row in report.assignments if row.status == "done" and row.device in report.end_to_end]
    if not rows:
        return []
    reference = [report.end_to_end[row.device] for row in rows]

    def mean(*names: str) -> tuple[float | None, float | None]:
        """(measured, predicted) mean of a round; None unless every figure is known."""
        both = ([of(name, rows) for name in names] for of in (resources.measured, resources.predicted))
        return tuple(
            None if any(f.value is None or f.reason for f in each) else sum(f.value or 0 for f in each) / len(rows)
            for each in both
        )  # type: ignore[return-value]

    step = [of("step_peak_bytes", rows).value for of in (resources.measured, resources.predicted)]
    flops, payload = mean("flops"), mean("payload_up_bytes", "payload_down_bytes")
    found = (
        ("memory", "B", step[0], step[1], float(max(one.step_peak_bytes for one in reference))),
        ("FLOPs", "FLOP", *flops, sum(one.flops for one in reference) / len(rows)),
        ("bytes", "B", *payload, sum(one.payload_bytes for one in reference) / len(rows)),
    )
    return [Saving(name, unit, spent, plan, whole) for name, unit, spent, plan, whole in found if spent and whole]


def ratio(one: Saving) -> str:
    """ "a fifth", "1/12", "87 %" or "1.3 times": a cost relative to the end-to-end prediction."""
    share = one.spent / one.end_to_end
    if share >= 1.05:
        return f"{share:.1f} times"
    parts = round(1 / share) if share else 0
    if parts >= 2 and abs(share * parts - 1) <= 0.1:
        return _PARTS[parts] if parts < len(_PARTS) else f"1/{parts}"
    return f"{100 * share:.0f} %"


def tightest(report: RunReport) -> resources.Use | None:
    """The measured budget use nearest to its limit, of equal ones the first; None without limits or measurements."""
    return max(_uses(report), key=lambda use: use.share, default=None)  # as in the table


def _uses(report: RunReport) -> Iterator[resources.Use]:
    """Measured use of every budget by every assignment."""
    devices = {row.device: row for row in report.devices}
    for row in report.assignments:
        if row.measured and row.device in devices:
            yield from resources.uses(devices[row.device], row)


def tightest_where(report: RunReport) -> str:
    """ "Tightest budget: wrist, payload of a round, 5.33 MiB of 8.00 MiB in stage 2, round 1."; "" without one."""
    if (use := tightest(report)) is None:
        return ""
    spent, allowed = (units.quantity(value, use.unit) for value in (use.spent, use.allowed))
    what = resources.LIMITED[use.what]
    return f"Tightest budget: {use.device}, {what}, {spent} of {allowed} in stage {use.stage}, round {use.round}."


def slowest(report: RunReport) -> str:
    """ "Slowest: stage 1, round 2, 55.2 s, waited for cam-08: training 46.0 s."; "" for a single round."""
    took = {_where(row): row.ended_at - row.started_at for row in report.rounds if row.ended_at is not None}
    if len(took) < 2:
        return ""
    stage, number = longest = max(took, key=lambda one: took[one])
    why = waits(report).get(longest, Wait()).text
    round_ = f"Slowest: stage {stage}, round {number}, {units.seconds(took[longest])}"
    return f"{round_}, waited for {why}." if why else f"{round_}."


def payload_used(report: RunReport) -> str:
    """ "Payload of a round at most: wrist 5.33 MiB of 8.00 MiB; each device's: --html."; "" without such a budget."""
    most = max((use for use in _uses(report) if use.what == "payload"), key=lambda use: use.share, default=None)
    if most is None:
        return ""
    spent, allowed = (units.quantity(value, most.unit) for value in (most.spent, most.allowed))
    return f"Payload of a round at most: {most.device} {spent} of {allowed}; each device's: --html."


def in_all(report: RunReport) -> str:
    """ "All devices together: step memory up to 13.3 MiB, 39.1 GFLOP, …; end to end, predicted: 48.0 MiB, …"; or ""."""
    found = [one for one in totals(report) if one.name in _IN_ALL]
    if all(one.measured.value is None for one in found):
        return ""
    spent = [_amount(_IN_ALL[one.name], one.measured, one.unit) for one in found]
    whole = [_amount(_IN_ALL[one.name], one.end_to_end, one.unit) for one in found]
    priced = any(one.end_to_end.value is not None for one in found)
    beside = f"; end to end, predicted for the same device rounds: {', '.join(whole)}" if priced else ""
    return f"All devices together: {', '.join(spent)}{beside}."


def _amount(words: str, figure: Figure, unit: str) -> str:
    """ "13.3 MiB of step memory", "at least 3.20 J", or "joules not known (no energy sensor)"."""
    if figure.value is None:
        why = figure.reason.partition(":")[0]  # where it was looked for is below the table
        return f"{words.removeprefix('of ') or unit} not known ({why})"
    least = "at least " if figure.reason else ""
    return f"{least}{units.quantity(figure.value, unit)} {words if words.startswith('of ') else ''}".rstrip()


def headline(report: RunReport) -> str:
    """ "4 of 4 devices trained; 99.2 % accuracy; the tightest, wrist, used 62 % of its memory; a fifth of …"."""
    trained = {row.device for row in report.assignments if row.status == "done"}
    partly = [one for one in attendance(report).missed if one.device in trained]
    some = ", ".join(f"{one.device} in {one.trained} of {one.of} rounds" for one in partly)
    some = some if len(partly) <= _NAMED else f"{len(partly)} of them not in every round"
    parts = [f"{len(trained)} of {len(report.devices)} devices trained" + f", {some}" * bool(some)]
    parts = parts if report.devices else []
    parts += _score(report)
    if (use := tightest(report)) is not None:
        of = "of the rounds trained, " if len(trained) < len(report.devices) or partly else ""
        parts.append(f"{of}the tightest, {use.device}, used {100 * use.share:.0f} % of its {use.what} budget")
    if found := savings(report):
        shares = [
            f"{ratio(one)} of {'end-to-end' + chr(8217) + 's' if not n else 'its'} {one.name}"
            for n, one in enumerate(found)
        ]
        parts.append(f"{', '.join(shares)} (this run as measured, end to end as predicted)")
    text = "; ".join(parts) or "No device has joined yet"
    return text[0].upper() + text[1:] + "."


def no_saving(report: RunReport) -> str:
    """Reason for a missing comparison with end-to-end training; "" if there is one, or nothing trained."""
    if savings(report) or not any(row.status == "done" for row in report.assignments):
        return ""
    every = set(report.part_bytes)
    if report.stages and all(every <= set(s.get("trained", ())) and not s.get("draw") for s in report.stages):
        return "It trains end to end itself, so there is no saving against that."
    if quality.by_own_code(report):
        return "The devices' own code (model.own) is not priced end to end, so no saving is told."
    return "No saving is told: the price of the run end to end takes torch to make."


def _score(report: RunReport) -> list[str]:
    """Clauses on the last test metric with all modalities, and on the devices' own accuracy."""
    metric = quality.primary_metric(report)
    rows = [row for row in quality.latest(report.evaluations) if row.metric == metric and row.missing == "none"]
    best = max(rows, key=lambda row: len(row.available), default=None)
    tested = []
    if best is not None:
        tested = [f"test {units.metric_words(metric)} {units.score(metric, best.value)}{_fallen(report, best)}"]
    own = None if metric == "accuracy" and tested else quality.own_accuracy(report)
    return tested if own is None else [*tested, f"accuracy of the devices' own models {units.percent(own)}"]


def _fallen(report: RunReport, last: EvaluationRow) -> str:
    """Score before the last round, in brackets; "" unless devices and score fell."""
    closed = sorted((row for row in report.rounds if row.status == "done"), key=_where)
    keys = [_where(row) for row in closed]
    alike = [row for row in report.evaluations if _test_of(row) == _test_of(last) and _where(row) in keys]
    before = max((row for row in alike if _where(row) < keys[-1]), key=_where, default=None)
    if len(closed) < 2 or _where(last) != keys[-1] or before is None or not units.is_share(last.metric):
        return ""
    fewer = len(closed[-1].participants) < len(closed[-2].participants)
    was, now = (units.score(row.metric, row.value) for row in (before, last))
    if not fewer or before.value <= last.value or was == now:
        return ""
    back = len(keys) - 1 - keys.index(_where(before))
    when = "a round before" if back == 1 else f"{back} rounds before"
    devices = f"{len(closed[-1].participants)} of {len(report.devices)} devices"
    return f" ({was} {when}; the last round is of {devices})"


def _where(row: EvaluationRow | RoundRow) -> tuple[int, int]:
    return row.stage, row.round


def _test_of(row: EvaluationRow) -> tuple[str, tuple[str, ...], str]:
    return row.metric, row.available, row.missing


def below_reference(report: RunReport) -> str:
    """Warning of a run with a score below a simple model's on the same samples; "" for none."""
    rows = [
        row
        for row in quality.latest(report.evaluations)
        if row.metric == report.reference.metric and row.missing == "none"
    ]
    last = max(rows, key=lambda row: len(row.available), default=None)
    return "" if last is None else below(report.reference, last.value)


def below(reference: Reference, score: float) -> str:
    """Warning of a score below a simple model's; "" for none, or without a reference."""
    scores = reference.scores
    if not scores:
        return ""
    admitted = {name: _ADMITTED.get(name.partition(" on ")[0], _LITTLE) for name in scores}
    name = max(scores, key=lambda one: scores[one] - admitted[one])
    if score >= scores[name] - admitted[name]:
        return ""
    reached, of = (units.score(reference.metric, one) for one in (scores[name], score))
    alone = re.fullmatch(r"(.+) on (\S+) alone", name)
    way = ""
    if alone is not None and scores[name] - scores.get(alone[1], scores[name]) > _LOST:
        way = f" The other modalities do it harm: try a run file with the encoder of {alone[2]} only."
    return f"Below a simple model: {name} has {reached} on the same samples, all in one place, and this run {of}.{way}"


def ways(report: RunReport) -> str:
    """Advice for a run below a simple model, by its own figures; "" where they support none."""
    encoders = report.config.get("run", {}).get("model", {}).get("encoders", {})
    texts = [m for m, each in encoders.items() if each.get("kind") == "text" and not each.get("pretrained")]
    found = [f"a pretrained encoder of {' and '.join(texts)} (edgefl init … --pretrained)"] if texts else []
    done = [row for row in report.assignments if row.status == "done"]
    last = [row for row in done if row.stage == max(row.stage for row in done)]
    for metric, name in (("received_loss", "loss on the devices' hold-outs"), ("loss", "training loss")):
        by_round: dict[int, list[float]] = {}
        for row in last:
            if metric in row.metrics:
                by_round.setdefault(row.round, []).append(row.metrics[metric])
        levels = [statistics.mean(by_round[number]) for number in sorted(by_round)]
        quarter = len(levels) // 4
        if quarter:
            was, now = statistics.mean(levels[-2 * quarter : -quarter]), statistics.mean(levels[-quarter:])
            rounds = [stage["rounds"] for stage in report.stages]
            more = ",".join(map(str, [*rounds[:-1], *(2 * each for each in rounds[-1:])]))
            if now < _FELL * was:
                less = units.percent(1 - now / was)
                found.append(f"more rounds (--set training.rounds=[{more}]): the {name} fell to the end, by {less}")
            break
    return f"Try {', or '.join(found)}." if found else ""


def lost(report: RunReport) -> str:
    """Warning of a score lost by later stages; "" where none was."""
    metric = quality.primary_metric(report)
    every = [row for row in report.evaluations if row.metric == metric and row.missing == "none"]
    most = max((len(row.available) for row in every), default=0)
    last = {row.stage: row.value for row in sorted(every, key=_where) if len(row.available) == most}
    if len(last) < 2 or not (metric == "r2" or units.is_share(metric)):
        return ""
    best, end = max(last, key=lambda stage: last[stage]), max(last)
    if last[best] - last[end] <= _LOST:
        return ""
    was, now = (units.score(metric, last[stage]) for stage in (best, end))
    word = units.metric_words(metric)
    way = f"try fewer rounds after stage {best} (training.rounds)"
    return f"Warning: {word} {was} after stage {best}, {now} after stage {end}: {way}."


def renamed(report: RunReport) -> str:
    """Sentence on devices of the run with another name than they enrolled with; "" for none."""
    there = {row.device for row in report.devices}
    pairs = [f"{shown}, formerly {own}" for own, shown in sorted(report.names.items()) if shown in there]
    return f"Renamed: {'; '.join(pairs)}." if pairs else ""


def troubles(report: RunReport) -> list[str]:
    """Faults of a run as sentences: how it ended unfinished, refusals with both numbers, absences, warnings.

    First a score below a simple model's, if so, with advice.
    """
    below, standing = below_reference(report), rounds.standing(report)
    warned = [f"Warning: {text}." for text in rounds.warnings(report)]
    advice = ways(report) if below else ""
    return [*filter(None, (below, advice, lost(report), standing)), *decisions.sentences(report), *warned]
