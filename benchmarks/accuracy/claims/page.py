"""The page of the claims: one table of verdicts, a plot of every difference, then the evidence paper by paper."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.claims.as_fleet import FILE, Compared
from benchmarks.accuracy.claims.baseline import Baseline, key
from benchmarks.accuracy.claims.judge import MEASURES, Claim, Finding, Rows, claims_of, judged, verdict
from benchmarks.accuracy.claims.outcome import Outcome
from benchmarks.accuracy.claims.plots import differences
from benchmarks.accuracy.claims.study import Study, Values
from benchmarks.accuracy.table.measures import over
from benchmarks.common.result_lines import rows_in

#: Measures that are no accuracies: columns of every table, and not of the plot.
COSTS = ("payload, MiB", "GFLOP", "step memory, MiB")
COMMAND = "python -m benchmarks.accuracy.claims"
_INTRODUCTION = """# What the papers claim, and what holds here

{sentence}{quick}

![Differences of every comparison with their intervals, by paper]({folder}/claims.svg)

Each line is one comparison: the mean difference over paired seeds and its interval of 95 % (Student's t); the tick is
the bound that is claimed. A comparison is *yes* or *no* where the interval leaves out the bound, else *undecided*; a
claim is *yes* when all its comparisons are, *no* when one of them is. *The paper* is the paper's own figure.

{table}

`{command}` on {machine}, {date}: {runs} runs with {hours:.1f} hours of training steps, and {tried} trials
of tuning with {trial_hours:.1f}; two run at a time, and steps are some 70 % of the time. Every run is the product's own
fleet in one process (`edgefl run --in-process`, [decision 52](../decisions/0052-one-process-is-another-transport.md)).
Tuning gives every method the same number of settings, by successive halving: all for a third of the rounds, the best
two for all rounds, by the measure of the claim, on training samples that are held out: a whole speaker or person where
the data have them, even where the test has the same ones. The test set is not seen. Accuracies are means over the
evaluations in the last third of the rounds. A variant has the settings of the method that it varies. Step memory is
predicted, tensors of a step (one process can not measure a device's). Encoders are small (three blocks, 32 wide), so
that all of it can be run again on a small machine: accuracies are not those of the papers.
"""


_QUICK = (
    " A preview: one seed, a sixth of the rounds, the settings that tuning chose for the whole, else the middle ones. "
    "It decides nothing: MMiC's warm-up of ten rounds, which draws devices at random, is not over by its end."
)


def write(
    found: Sequence[tuple[Study, Sequence[Outcome], Sequence[Outcome]]],
    path: Path,
    baselines: Mapping[str, Baseline] | None = None,
) -> None:
    """The page at ``path`` and its plot beside it. ``found``: a study, its runs that stand, its trials."""
    quick = any(study.quick for study, _, _ in found)
    folder = path.parent / path.stem
    folder.mkdir(parents=True, exist_ok=True)
    papers = [(study, rows, _findings(study, rows)) for study, rows, _ in found]
    drawn = [
        (study.values["title"], one)
        for study, _, claims in papers
        for _, findings in claims
        for one in findings
        if one is not None and one.asked.measure not in COSTS
    ]
    differences(drawn, folder / "claims.svg")
    runs = [row for _, rows, _ in papers for row in rows]
    trials = [row for _, _, tried in found for row in tried]
    lines = [
        _INTRODUCTION.format(
            sentence=_sentence(papers),
            quick=_QUICK if quick else "",
            folder=path.stem,
            table="\n".join(_verdicts(papers)),
            command=COMMAND + (" --quick" if quick else ""),
            machine=f"{os.cpu_count()} cores ({platform.machine()}, Python {platform.python_version()})",
            date=time.strftime("%Y-%m"),
            runs=len(runs),
            tried=len(trials),
            hours=sum(row.cpu_s for row in runs) / 3600,
            trial_hours=sum(row.cpu_s for row in trials) / 3600,
        )
    ]
    for study, rows, claims in papers:
        lines += _paper(study, rows, claims, baselines or {})
    lines += _as_fleets(folder / FILE)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _as_fleets(path: Path) -> list[str]:
    """Cells that were run as real fleets as well; nothing where none was."""
    rows = [
        f"* {one.task}, {one.method}, {one.condition}, seed {one.seed}"
        f"{', a third of the rounds' if one.short else ''}: {one.equal} of {one.states} states are the same"
        f" to the last bit; fleet {one.fleet_s:.0f} s, one process {one.one_s:.0f} s"
        for one in rows_in(path, Compared)
    ]
    return ["## As a fleet over MQTT", "", *rows, ""] if rows else []


Judged = list[tuple[Claim, list[Finding | None]]]


def _findings(study: Study, rows: Sequence[Outcome]) -> Judged:
    by_cell: dict[tuple[str, str, str], dict[int, Outcome]] = {}
    for row in rows:
        by_cell.setdefault((row.task, row.condition, row.method), {})[row.seed] = row
    table: Rows = by_cell
    return [(claim, [judged(one, table) for one in claim.comparisons]) for claim in claims_of(study.values)]


def _sentence(papers: Sequence[tuple[Study, Sequence[Outcome], Judged]]) -> str:
    told = [verdict(findings) for _, _, claims in papers for _, findings in claims]
    counts = [f"{told.count(one)} {one}" for one in _VERDICTS if told.count(one)]
    short = sum(bool(_seeds(study, findings)) for study, _, claims in papers for _, findings in claims)
    fewer = f" {short} of them have fewer seeds than planned." if short else ""
    return f"Of {len(told)} claims: {', '.join(counts)}.{fewer}"


_VERDICTS = ("yes", "yes so far", "no", "undecided", "not run")


def _verdicts(papers: Sequence[tuple[Study, Sequence[Outcome], Judged]]) -> list[str]:
    lines = ["| paper | claim | the paper | here | verdict |", "|---|---|---|---|---|"]
    every = [(study, *one) for study, _, claims in papers for one in claims]
    for study, claim, findings in sorted(every, key=lambda one: verdict(one[2]) == "not run"):
        here = "; ".join(_short(study, one) for one in findings if one is not None) or "–"
        lines.append(
            f"| {study.values['title']} | {claim.text} | {claim.effect or '–'} | {here} | "
            f"**{verdict(findings)}**{_seeds(study, findings)} |"
        )
    return lines


def _seeds(study: Study, findings: Sequence[Finding | None]) -> str:
    """Such as ", 3 of 5 seeds", of the comparison that has the fewest; "" where every one has all."""
    fewest = min((one.gain.seeds for one in findings if one is not None), default=len(study.seeds))
    return f", {fewest} of {len(study.seeds)} seeds" if fewest < len(study.seeds) else ""


def _short(study: Study, one: Finding) -> str:
    """Such as har mm50-mc50 to fedavg +1.3 [+0.4, +2.2]; a task's only condition is not named."""
    asked = one.asked
    several = len(study.tasks[asked.task]["conditions"]) > 1
    return f"{asked.task}{f' {asked.condition}' if several else ''} to {asked.against} {_difference(one)}"


def _difference(one: Finding) -> str:
    """Such as +1.3 [+0.4, +2.2]; of a cost how many times less it is, ÷ 2.2."""
    if one.asked.measure in COSTS:
        return f"÷ {one.right.mean / one.left.mean:.1f}"
    mean, low, high = one.difference
    return f"{mean:+.1f} [{'one seed' if math.isinf(low) else f'{low:+.1f}, {high:+.1f}'}]"


def _paper(study: Study, rows: Sequence[Outcome], claims: Judged, baselines: Mapping[str, Baseline]) -> list[str]:
    values = study.values
    lines = [f"## {values['title']}", "", values["says"].strip(), ""]
    for claim, findings in claims:
        lines += [
            f"**{claim.text[0].upper()}{claim.text[1:]}: {verdict(findings)}.** {claim.note.strip()}".rstrip(),
            "",
        ]
        lines += _evidence(findings)
    for task, asked in study.tasks.items():
        own = [row for row in rows if row.task == task]
        lines += [f"### {asked['title']}", "", asked["says"].strip(), ""]
        if bar := baselines.get(key(study, task)):
            lines += [f"Simple baseline, logistic regression on all training samples, complete: {bar.text}.", ""]
        lines += [*_rows(study, task, own), ""] if own else ["Not run yet.", ""]
    return lines


def _evidence(findings: Sequence[Finding | None]) -> list[str]:
    known = [one for one in findings if one is not None]
    if not known:
        return []
    lines = ["| task | condition | measure | | against | difference [95 %] | seeds | verdict |", "|---" * 8 + "|"]
    for one in known:
        asked = one.asked
        measure = asked.measure + (f", lost since {asked.falling}" if asked.falling else "")
        bound = f" (claimed: more than {asked.margin:+g})" if asked.margin else ""
        lines.append(
            f"| {asked.task} | {asked.condition} | {measure}{bound} | {asked.left} {one.left.text()} | "
            f"{asked.against} {one.right.text()} | {_difference(one)} | {one.gain.seeds} | {one.verdict} |"
        )
    return [*lines, ""]


def _rows(study: Study, task: str, rows: Sequence[Outcome]) -> list[str]:
    shown = [name for name in study.tasks[task].get("shown", ["accuracy"]) if any(MEASURES[name](r) for r in rows)]
    conditions = list(study.tasks[task]["conditions"])
    costs = () if "worker" in study.values else COSTS  # a worker of its own computes more than the method
    heads = ["method", *(f"{name}, {condition}" for condition in conditions for name in shown), *costs]
    lines = ["| " + " | ".join([*heads, "settings", "seeds"]) + " |", "|---" * (len(heads) + 2) + "|"]
    for method, values in study.methods.items():
        own = [row for row in rows if row.method == method]
        if not own:
            continue
        cells = [f"{method} ({values['says']})" if "says" in values else method]
        for condition in conditions:
            at = [row for row in own if row.condition == condition]
            cells += [_text([v for row in at if (v := MEASURES[name](row)) is not None]) for name in shown]
        cells += [_text([v for row in own if (v := MEASURES[name](row)) is not None], spread=False) for name in costs]
        cells += [_settings(own[-1].settings, values), str(len({row.seed for row in own}))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += _acted(study, rows)
    return lines


def _acted(study: Study, rows: Sequence[Outcome]) -> list[str]:
    lines = []
    for method in study.methods:
        own = [row for row in rows if row.method == method and row.acted]
        if own:
            names = list(dict.fromkeys(name for row in own for name in row.acted))
            told = ", ".join(f"{name} {_text([row.acted[name] for row in own if name in row.acted])}" for name in names)
            lines.append(f"* {method}, a run: {told}")
    return ["", *lines] if lines else []


def _text(values: Sequence[float], *, spread: bool = True) -> str:
    found = over(values)
    if found is None:
        return "–"
    return found.text() if spread else f"{found.mean:.1f}"


def _settings(settings: Mapping[str, object], method: Values) -> str:
    """What was tuned; of a variant, its own where it sets the same."""
    own = method.get("set", {}) if "tuned_as" in method else {}
    every = {name: own.get(name, value) for name, value in settings.items()}
    return ", ".join(f"{name.removeprefix('slots.')} {_told(value)}" for name, value in every.items())


def _told(value: object) -> str:
    """A setting in words: prototype_contrast (weight 0.1, temperature 0.07) of a mapping, else the value."""
    if not isinstance(value, Mapping):
        return str(value).replace("|", "/")
    each = (
        f"{name} ({_inner(inner)})" if isinstance(inner, Mapping) and inner else str(name)
        for name, inner in value.items()
    )
    return ", ".join(each)


def _inner(value: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items())
